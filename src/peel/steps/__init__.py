"""The paper, one file per step.

1. `backbone`           Section 3, step 1: the over-pruned backbone and the pool
2. `importance`         step 2, equations 3 and 4: the importance of layers, measured on the trained backbone
3. `..graph.grouping`   step 3: layers of the same spatial size form a group (a part of `trace`)
4. `reallocation`       step 4, equation 5: the groups get the pool
5. `distillation`       step 5: the slim network is trained with the original as teacher
"""
