"""The kernels that read slots in place, on a CPU, composed of torch's operations: offsets are real addresses.

So the tables, the graph runner and everything above are tested without a GPU and without Triton.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from math import prod

import numpy as np
import torch
import torch.nn.functional as F

from adapterbank.encoder.dropout import Mask, mix
from adapterbank.encoder.forward import ACTIVATIONS
from adapterbank.encoder.kernels import Kernels
from adapterbank.training import optimizer


def numbers(base, offset, *shape):
    """Return a copy of the numbers at an offset from `base`."""
    address = base.data_ptr() + int(offset) * base.element_size()
    raw = (ctypes.c_char * (prod(shape) * base.element_size())).from_address(address)
    return torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).view(base.dtype).view(shape)


def by_row(places, *tensors):
    """Yield each row's part of some tensors `[T, ...]`, after its line of the table."""
    rows = places.rows.numel()
    length = len(tensors[0]) // rows
    for row, line in enumerate(places.rows.tolist()):
        part = slice(row * length, (row + 1) * length)
        yield places.table[line].tolist(), *(tensor[part] for tensor in tensors)


def bottleneck(v, own, base, form, width, outputs):
    """Run the bottleneck whose tensors begin at the offsets `own`."""
    coming, inputs = iter(own), v.shape[1]

    def linear(v, n, biased):
        weight = numbers(base, next(coming), n, v.shape[1])
        return F.linear(v, weight, numbers(base, next(coming), n) if biased else None)

    if form.inner_norm:
        gain, shift = (numbers(base, next(coming), inputs) for _ in range(2))
        v = F.layer_norm(v, (inputs,), gain, shift)
    for _ in range(form.depth):
        v = linear(v, width, form.biases)
        v = ACTIVATIONS[form.activation](v) if form.activation else v
    weight = numbers(base, next(coming), outputs, width)
    v = F.linear(v, weight) * form.scale
    return v + numbers(base, next(coming), outputs) if form.biases else v


def site(
    y, x, places, *, read=None, out=None, form=None, adapter_at=0, norm_at=None, epsilon=0.0, residual=True, drop=None,
    saved=None,
):  # fmt: skip
    """See `encoder.kernels.site.site`."""
    assert drop is None
    assert saved is None
    given = x if y is None else y
    out = torch.empty_like(given) if out is None else out
    read = given if read is None else read
    for line, part, rest, v, into in by_row(places, given, x, read, out):
        width = line[adapter_at] if form else 0
        assert not form or (width == form.widest if form.equal else width <= form.widest)
        z = 0.0 if y is None else part
        if width:
            u = bottleneck(v, line[adapter_at + 1 :], places.base, form, width, out.shape[1])
            z = z + (z * u if form.multiply else u)
        z = z + rest if residual else z
        if norm_at is not None:
            gain, shift = (numbers(places.base, line[norm_at + k], out.shape[1]) for k in range(2))
            z = F.layer_norm(z, z.shape[-1:], gain, shift, epsilon)
        into.copy_(z)
    return out


def vectors(y, places, *, scale_at=None, shift_at=None):
    """See `encoder.kernels.slots.vectors`."""
    for line, part in by_row(places, y):
        if scale_at is not None:
            part *= numbers(places.base, line[scale_at], y.shape[1])
        if shift_at is not None:
            part += numbers(places.base, line[shift_at], y.shape[1])


def project(x, places, outputs, at):
    """See `encoder.kernels.slots.project`."""
    out = torch.zeros(len(x), outputs)
    for line, part, into in by_row(places, x, out):
        width, weight, bias = line[at : at + 3]
        assert width <= outputs
        into[:, :width] = F.linear(
            part, numbers(places.base, weight, width, x.shape[1]), numbers(places.base, bias, width)
        )
    return out


def trained_site(anchor, y, x, about):
    """See `encoder.kernels.site_gradient.trained_site`."""
    out = Trained.apply(anchor, y, x, about)
    with torch.no_grad():  # what the kernels keep, in place of a copy of the output
        z = composed(y, x, replace(about, norm_at=None), *tables(replace(about, norm_at=None), x.shape[1]))
    norm = tables(replace(about, form=None), x.shape[1])
    return out, lambda: composed(None, z, about, *norm)


class Trained(torch.autograd.Function):
    """Computes a site again where its gradients are asked for."""

    @staticmethod
    def forward(ctx, anchor, y, x, about):
        ctx.save_for_backward(x, *([] if y is None else [y]))
        ctx.about = about
        return composed(y, x, about, *tables(about, x.shape[1]))

    @staticmethod
    def backward(ctx, dout):
        about = ctx.about
        x, *y = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        norm, adapter = ([t.requires_grad_() for t in part] for part in tables(about, x.shape[1]))
        with torch.enable_grad():
            out = composed(y[0] if y else None, x, about, norm, adapter)
        dx, *rest = torch.autograd.grad(out, [x, *y, *norm, *adapter], dout)
        dy, grads = rest[: len(y)], rest[len(y) :]
        for into, grad in zip(about.into.norm or (), grads, strict=False):
            into += grad
        for into, grad in zip(about.into.adapter or (), grads[len(norm) :], strict=True):
            into += grad
        return None, dy[0] if dy else None, dx, None


def tables(about, hidden):
    """Return what the table points at, `[places, ...]`: gain and shift, then the tensors of the bottleneck."""
    norm, adapter = [], []
    if about.norm_at is not None:
        norm = [(about.norm_at + k, (hidden,)) for k in range(2)]
    if about.form:
        m = about.form.widest
        adapter = list(enumerate(((m, hidden), (m,), (hidden, m), (hidden,)), about.adapter_at + 1))
    lines = about.places.table.tolist()
    return [
        [torch.stack([numbers(about.places.base, line[at], *shape) for line in lines]) for at, shape in part]
        for part in (norm, adapter)
    ]


def composed(y, x, about, norm, adapter):
    """Compute a site of slots with the same number of rows each."""
    z, count = x, len(about.places.table)
    if y is not None:
        mask = about.drop and Mask(about.drop.rate, about.drop.tokens[:, None], about.drop.columns)
        z = mask.drop(y) if mask else y
        if adapter:
            down, down_bias, up, up_bias = adapter
            v = z.view(count, -1, z.shape[1]) @ down.transpose(1, 2) + down_bias[:, None]
            v = ACTIVATIONS[about.form.activation](v) @ up.transpose(1, 2) + up_bias[:, None]
            z = z + v.view(z.shape)
        z = z + x
    if not norm:
        return z
    gain, shift = norm
    normal = F.layer_norm(z, z.shape[-1:], None, None, about.epsilon).view(count, -1, z.shape[1])
    return (normal * gain[:, None] + shift[:, None]).view(z.shape)


def drop(x, keys, columns, rate):
    """See `encoder.kernels.elementwise.drop`."""
    return Mask(rate, keys[:, None], columns).drop(x)


def update(p, m, v, g, numbers, *, first, second):
    """See `encoder.kernels.elementwise.update`."""
    assert (first, second) == (0.9, 0.999)
    optimizer.update_rows(p, m, v, g, numbers)


PLAIN = Kernels(site, trained_site, vectors, project, drop, mix, F.gelu, update)
