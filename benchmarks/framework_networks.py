"""The networks of `frameworks.py`: "package/network" -> a function that builds it, with an example input.

They are small, have random weights and download nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

NETWORKS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}

#: Name of a package where its distribution has another.
DISTRIBUTIONS = {"smp": "segmentation-models-pytorch", "open_clip": "open_clip_torch"}

SMALL = torch.randn(1, 3, 64, 64)


def network(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def enter(build: Callable[[], Any]) -> Callable[[], Any]:
        NETWORKS[name] = build
        return build

    return enter


# Classifiers


def _timm(name: str, size: int = 64, **options: Any) -> None:
    def build() -> Any:
        import timm

        return timm.create_model(name, **options), torch.randn(1, 3, size, size)

    NETWORKS[f"timm/{name}" + "".join(f",{key}" for key in options)] = build


for _name in ("resnet18", "convnext_atto", "mobilenetv3_small_100", "efficientnet_b0", "ghostnet_050"):
    _timm(_name)
_timm("resnet18", features_only=True)
_timm("swin_tiny_patch4_window7_224", 224)


def _pytorchcv(name: str, size: int) -> None:
    def build() -> Any:
        from pytorchcv.model_provider import get_model

        return get_model(name), torch.randn(1, 3, size, size)

    NETWORKS[f"pytorchcv/{name}"] = build


for _name in ("seresnet20_cifar10", "shufflenetv2_wd2", "mobilenetv2_wd4", "preresnet10"):
    _pytorchcv(_name, 32 if "cifar" in _name else 224)


@network("pretrainedmodels/se_resnet50")
def _() -> Any:
    import pretrainedmodels

    return pretrainedmodels.se_resnet50(pretrained=None), torch.randn(1, 3, 224, 224)


@network("efficientnet_pytorch/b0")
def _() -> Any:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0"), SMALL


@network("efficientnet-lite-pytorch/lite0")
def _() -> Any:
    from efficientnet_lite_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-lite0"), SMALL


@network("facenet-pytorch/inception_resnet_v1")
def _() -> Any:
    from facenet_pytorch import InceptionResnetV1

    return InceptionResnetV1(pretrained=None, classify=True, num_classes=10), torch.randn(1, 3, 160, 160)


@network("torchxrayvision/densenet")
def _() -> Any:
    import torchxrayvision

    return torchxrayvision.models.DenseNet(num_classes=5, in_channels=1), torch.randn(1, 1, 64, 64)


@network("torchgeo/resnet18")
def _() -> Any:
    from torchgeo.models import resnet18

    return resnet18(), SMALL


@network("open_clip/image_tower")
def _() -> Any:
    from open_clip.modified_resnet import ModifiedResNet

    return ModifiedResNet([1, 1, 1, 1], output_dim=32, heads=4, image_size=64, width=16), SMALL


@network("kornia/hardnet")
def _() -> Any:
    from kornia.feature import HardNet

    return HardNet(pretrained=False), torch.randn(4, 1, 32, 32)


@network("kornia/rrdbnet")
def _() -> Any:
    from kornia.models.rrdbnet import RRDBNet

    return RRDBNet(3, 3, num_feat=16, num_block=1, num_grow_ch=8), torch.rand(1, 3, 24, 24)


@network("pytorch-wavelets/scattering_classifier")
def _() -> Any:
    from pytorch_wavelets import DWTForward

    class Wavelets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.dwt = nn.Conv2d(3, 16, 3, padding=1), DWTForward(J=1, wave="db2", mode="zero")
            self.mix, self.fc = nn.Conv2d(16, 24, 3), nn.Linear(24, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low, _ = self.dwt(self.conv(x).relu())
            return self.fc(self.mix(low).relu().mean((2, 3)))

    return Wavelets(), SMALL


@network("spikingjelly/spiking_vgg11_bn")
def _() -> Any:
    from spikingjelly.activation_based import neuron
    from spikingjelly.activation_based.model import spiking_vgg

    return spiking_vgg.spiking_vgg11_bn(spiking_neuron=neuron.IFNode, num_classes=10), SMALL


# Segmentation


@network("fastai/unet")
def _() -> Any:
    import torchvision
    from fastai.vision.models.unet import DynamicUnet

    encoder = nn.Sequential(*list(torchvision.models.resnet18().children())[:-2])
    model = DynamicUnet(encoder, 5, (64, 64))
    model(torch.randn(2, 3, 64, 64))  # a user has trained it
    return model, SMALL


@network("fastai/xresnet18")
def _() -> Any:
    from fastai.vision.models.xresnet import xresnet18

    return xresnet18(n_out=10), SMALL


def _smp(kind: str, encoder: str) -> None:
    def build() -> Any:
        import segmentation_models_pytorch as smp

        return getattr(smp, kind)(encoder, encoder_weights=None, classes=3), SMALL

    NETWORKS[f"smp/{kind},{encoder}"] = build


for _kind, _encoder in (
    ("Unet", "resnet18"),
    ("UnetPlusPlus", "mobilenet_v2"),
    ("FPN", "efficientnet-b0"),
    ("DeepLabV3Plus", "resnet34"),
    ("Linknet", "timm-mobilenetv3_small_100"),
    ("MAnet", "resnet18"),
):
    _smp(_kind, _encoder)


def _monai(name: str, spatial: int, **options: Any) -> None:
    def build() -> Any:
        from monai.networks import nets

        size = options.get("spatial_size", 32)
        dims = {"spatial_dims": spatial} if name != "DynUNet" else {}
        given = {key: value for key, value in options.items() if key != "spatial_size"}
        return getattr(nets, name)(**dims, **given), torch.randn(1, 2, *[size] * spatial)

    NETWORKS[f"monai/{name}{spatial}d"] = build


_monai("UNet", 3, in_channels=2, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
_monai("SegResNet", 3, in_channels=2, out_channels=2, init_filters=8)
_monai("BasicUNet", 2, in_channels=2, out_channels=2, features=(8, 8, 16, 32, 64, 8))
_monai("DenseNet121", 2, in_channels=2, out_channels=3, spatial_size=64)
_monai(
    "DynUNet",
    2,
    spatial_dims=2,
    in_channels=2,
    out_channels=2,
    kernel_size=[3, 3, 3],
    strides=[1, 2, 2],
    upsample_kernel_size=[2, 2],
    filters=[8, 16, 32],
)


@network("dynamic_network_architectures/PlainConvUNet")
def _() -> Any:
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    model = PlainConvUNet(
        2, 3, [8, 16, 32], nn.Conv3d, 3, [1, 2, 2], 1, 3, 1, conv_bias=True,
        norm_op=nn.InstanceNorm3d, norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU,
    )  # fmt: skip
    return model, torch.randn(1, 2, 16, 16, 16)


@network("nnunetv2/ResidualEncoderUNet")
def _() -> Any:
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

    arguments = {
        "n_stages": 3, "features_per_stage": [8, 16, 32], "conv_op": "torch.nn.modules.conv.Conv2d",
        "kernel_sizes": [[3, 3]] * 3, "strides": [[1, 1], [2, 2], [2, 2]], "n_blocks_per_stage": [1, 1, 1],
        "n_conv_per_stage_decoder": [1, 1], "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm2d", "norm_op_kwargs": {"affine": True},
        "nonlin": "torch.nn.LeakyReLU", "nonlin_kwargs": {"inplace": True},
    }  # fmt: skip
    name = "dynamic_network_architectures.architectures.unet.ResidualEncoderUNet"
    model = get_network_from_plans(name, arguments, ["conv_op", "norm_op", "nonlin"], 2, 3, True, False)
    return model, torch.randn(1, 2, 32, 32)


@network("segment-anything/image_encoder")
def _() -> Any:
    from segment_anything.modeling import ImageEncoderViT

    return ImageEncoderViT(img_size=64, depth=2, embed_dim=48, num_heads=4, out_chans=32), SMALL


# transformers


def _transformers(name: str, kind: str, config: str, example: Any = SMALL, **options: Any) -> None:
    def build() -> Any:
        import transformers

        given = {key: value() if callable(value) else value for key, value in options.items()}
        model = getattr(transformers, kind)(getattr(transformers, config)(**given))
        return model, example if isinstance(example, dict) else {"pixel_values": example}

    NETWORKS[f"transformers/{name}"] = build


def _convnext() -> Any:
    from transformers import ConvNextConfig

    stages = ["stage1", "stage2", "stage3", "stage4"]
    return ConvNextConfig(hidden_sizes=[16, 32, 40, 64], depths=[1, 1, 1, 1], out_features=stages)


def _rt_detr_backbone() -> Any:
    from transformers import RTDetrResNetConfig

    stages = ["stage2", "stage3", "stage4"]
    return RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1] * 4, layer_type="basic",
        out_features=stages,
    )  # fmt: skip


_SIZES = {"hidden_sizes": [16, 32, 40, 64], "depths": [1, 1, 1, 1]}
_transformers("resnet", "ResNetForImageClassification", "ResNetConfig", embedding_size=16, **_SIZES)
_transformers("convnext", "ConvNextForImageClassification", "ConvNextConfig", **_SIZES)
_transformers(
    "segformer", "SegformerForSemanticSegmentation", "SegformerConfig",
    num_attention_heads=[1, 2, 5, 8], decoder_hidden_size=32, **_SIZES,
)  # fmt: skip
_transformers(
    "upernet", "UperNetForSemanticSegmentation", "UperNetConfig", backbone_config=_convnext,
    hidden_size=32, auxiliary_in_channels=40, auxiliary_channels=16,
)  # fmt: skip
_transformers(
    "wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", {"input_values": torch.randn(1, 2000)},
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, conv_dim=(16, 16),
    conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2, mask_time_length=2,
)  # fmt: skip
_transformers(
    "rt_detr", "RTDetrForObjectDetection", "RTDetrConfig", backbone_config=_rt_detr_backbone,
    encoder_hidden_dim=32, encoder_in_channels=[32, 48, 64], d_model=32, encoder_ffn_dim=48,
    decoder_ffn_dim=48, decoder_in_channels=[32, 32, 32], num_queries=20, decoder_layers=2,
    encoder_attention_heads=4, decoder_attention_heads=4, num_denoising=0,
)  # fmt: skip
_transformers(
    "mobilevit", "MobileViTForImageClassification", "MobileViTConfig", hidden_sizes=[24, 32, 40],
    neck_hidden_sizes=[16, 16, 24, 32, 40, 48, 64], image_size=64,
)  # fmt: skip


# Generation, restoration


@network("diffusers/UNet2DModel")
def _() -> Any:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return model, {"sample": torch.randn(1, 3, 32, 32), "timestep": torch.tensor([3])}


@network("diffusers/AutoencoderKL")
def _() -> Any:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, latent_channels=4)
    return model, {"sample": torch.randn(1, 3, 32, 32)}


@network("super-image/EdsrModel")
def _() -> Any:
    from super_image import EdsrConfig, EdsrModel

    return EdsrModel(EdsrConfig(scale=2, n_resblocks=2, n_feats=16)), torch.rand(1, 3, 24, 24)


@network("basicsr/RRDBNet")
def _() -> Any:
    from basicsr.archs.rrdbnet_arch import RRDBNet

    return RRDBNet(3, 3, num_feat=16, num_block=1, num_grow_ch=8), torch.rand(1, 3, 24, 24)


# Detection


@network("ultralytics/yolov8n")
def _() -> Any:
    from ultralytics.nn.tasks import DetectionModel

    return DetectionModel("yolov8n.yaml", verbose=False), SMALL


@network("ultralytics/yolo11n-cls")
def _() -> Any:
    from ultralytics.nn.tasks import ClassificationModel

    return ClassificationModel("yolo11n-cls.yaml", verbose=False), SMALL


@network("yolov5/yolov5n")
def _() -> Any:
    from yolov5.models import yolo

    return yolo.Model(str(Path(yolo.__file__).parent / "yolov5n.yaml")), SMALL


@network("libreyolo/yolox_nano")
def _() -> Any:
    from libreyolo.models.yolox.nn import LibreYOLOXModel

    return LibreYOLOXModel(config="n", nb_classes=5), SMALL


# How networks are trained


@network("lightning/module")
def _() -> Any:
    import lightning
    import torchvision

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = torchvision.models.mobilenet_v3_small(num_classes=10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.network(x)

    return Classifier(), SMALL


@network("accelerate/prepared")
def _() -> Any:
    import torchvision
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare_model(torchvision.models.resnet18(num_classes=10)), SMALL


# Tools that take a slim network


def _resnet() -> Any:
    import torchvision

    return torchvision.models.resnet18(num_classes=10), SMALL


TOOLS: dict[str, Callable[[nn.Module, Any], None]] = {}


def tool(name: str) -> Callable[[Callable[[nn.Module, Any], None]], None]:
    def enter(convert: Callable[[nn.Module, Any], None]) -> None:
        TOOLS[name] = convert
        NETWORKS[f"{name}/resnet18"] = _resnet

    return enter


def _compare(model: nn.Module, example: Any, found: Any) -> None:
    import numpy as np

    with torch.no_grad():
        wanted = model(example).numpy()
    np.testing.assert_allclose(np.asarray(found).reshape(wanted.shape), wanted, rtol=0.05, atol=0.02)


@tool("openvino")
def _(model: nn.Module, example: Any) -> None:
    import openvino

    compiled = openvino.compile_model(openvino.convert_model(model, example_input=example), "CPU")
    _compare(model, example, compiled(example.numpy())[0])


@tool("executorch")
def _(model: nn.Module, example: Any) -> None:
    from executorch.exir import to_edge
    from executorch.runtime import Runtime

    program = to_edge(torch.export.export(model, (example,))).to_executorch()
    method = Runtime.get().load_program(program.buffer).load_method("forward")
    _compare(model, example, method.execute([example])[0])


@tool("litert-torch")
def _(model: nn.Module, example: Any) -> None:
    import litert_torch

    _compare(model, example, litert_torch.convert(model, (example,))(example))


@tool("coremltools")
def _(model: nn.Module, example: Any) -> None:
    import coremltools

    program = torch.export.export(model, (example,)).run_decompositions({})
    coremltools.convert(program, minimum_deployment_target=coremltools.target.iOS17)


@tool("ncnn")
def _(model: nn.Module, example: Any) -> None:
    """Only what its users do in Python: the graph of torch.jit that its converter `pnnx` reads."""
    import ncnn
    import pnnx

    with TemporaryDirectory() as folder:
        pnnx.export(model, str(Path(folder) / "slim.pt"), (example,))
        net = ncnn.Net()
        net.load_param(str(Path(folder) / "slim.ncnn.param"))
        net.load_model(str(Path(folder) / "slim.ncnn.bin"))
        extractor = net.create_extractor()
        extractor.input("in0", ncnn.Mat(example[0].numpy()))
        _compare(model, example, extractor.extract("out0")[1].numpy())


@tool("torchao")
def _(model: nn.Module, example: Any) -> None:
    import copy

    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    twin = copy.deepcopy(model)
    quantize_(twin, Int8WeightOnlyConfig())
    with torch.no_grad():
        _compare(model, example, twin(example))
