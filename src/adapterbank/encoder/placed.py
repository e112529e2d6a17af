"""An encoder on its device, in the type the pass computes in. Placed once, used by training and inference alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adapterbank.encoder.backbone import Backbone
from adapterbank.encoder.families import EncoderConfig
from adapterbank.encoder.forward import join_projections


@dataclass(frozen=True)
class PlacedEncoder:
    """A backbone's tensors on a device; the backbone's own stay untouched."""

    config: EncoderConfig
    tensors: Mapping[str, Tensor] = field(repr=False)
    device: torch.device
    dtype: torch.dtype
    layout: str = "fp32"
    """How a CPU keeps the matrices (`products.LAYOUTS`)."""
    recompute: str = "auto"
    """Whether training steps compute outputs again instead of keeping them (`recompute.RECOMPUTE`)."""


def place(
    backbone: Backbone, device: torch.device, dtype: torch.dtype, layout: str = "fp32", *, recompute: str = "auto"
) -> PlacedEncoder:
    """Copy an encoder's tensors to a device in a type, query, key and value joined.

    On a CPU nothing is copied but the matrices, which are laid out once for the products of all places.
    """
    if device.type == "cpu" and dtype == torch.float32:
        return PlacedEncoder(backbone.config, backbone.laid_out(layout), device, dtype, layout, recompute)
    tensors = join_projections({name: tensor.to(device, dtype) for name, tensor in backbone.tensors.items()})
    return PlacedEncoder(backbone.config, tensors, device, dtype, layout, recompute)
