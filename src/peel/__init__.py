"""Make a convolutional network fit a budget.

    graph = peel.trace(model, example_input)         which channels are tied, and what they cost
    widths = peel.uniform(graph, budget="50%")       one integer per tie
    result = peel.prune(model, data, budget="50%")   a slim model: result.model, result.plan, result.history
    small = peel.slim(model, widths, graph=graph)    a new model of the same class
    peel.save(small, "slim"); peel.load("slim")      one safetensors file
    peel.export(small, "slim.onnx")                  ONNX or torch.export; checked
    peel.bench({"original": model, "slim": small})   latency and throughput, interleaved

`import peel` is cheap: names are imported when they are first used (`__init__.pyi` lists them).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
