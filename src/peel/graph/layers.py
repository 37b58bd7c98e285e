"""Kinds of layers, and tensors that nothing can be done with."""

from torch import nn

from ..errors import ModelError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (*BATCH_NORMS, *INSTANCE_NORMS, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def refuse_meta_tensors(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"{name} of the model is on the meta device and has no values. Build the model on a real "
                "device, or load its weights, first."
            )


def refuse_inference_tensors(model: nn.Module) -> None:
    """They can neither be written nor have gradients outside of inference mode."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise ModelError(
                f"{name} of the model was made under torch.inference_mode and cannot be changed or have "
                "gradients. Build, load or copy the model outside of it."
            )
