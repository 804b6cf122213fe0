r"""Apply affine maps to images and vectors, differentiably in the map.

An image x is a function on the plane, known at its pixels and zero outside. The map T reads it at
other places, $(T x)(q) = x(T q)$, by bilinear interpolation. The origin is the image centre, and
the unit is half the width in both directions, so that a rotation is a rotation for any aspect
ratio.

The adjoint transforms weights instead of inputs. Since

$$ \int w(q)\, x(Tq)\, dq = |T|^{-1} \int w(T^{-1} p)\, x(p)\, dp, $$

transforming every input by T equals, up to interpolation, transforming the filters once:
$(W \circ T) x = W (T \circ x)$ (Learning Invariant Weights, section 3.2).
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def resample(
    images: Float[Tensor, "*lead n c h w"],
    matrices: Float[Tensor, "*lead s 3 3"],
    blur: float = 0.0,
) -> Float[Tensor, "*lead n s c h w"]:
    """Return every image under every map: bilinear, zeros outside.

    Images that share their maps are interpolated together, so that the interpolation weights are
    computed once. To give every image its own maps, add a leading dimension.

    Args:
        images: floating-point images.
        matrices: homogeneous maps, with the leading dimensions of `images` or none.
        blur: standard deviation in pixels of a Gaussian filter applied first; 0 for none.
    """
    check_images(images)
    if not blur >= 0:
        raise ValueError(f"blur must be at least 0 pixels, got {blur}.")
    lead, (n, c, h, w) = images.shape[:-4], images.shape[-4:]
    maps = _check_maps(matrices, lead)
    places = _places(maps.to(images.dtype), h, w)
    flat = images.reshape(-1, n * c, h, w)
    if blur > 0:
        flat = _blurred(flat, blur)
    s = maps.shape[-3]
    grid = places.reshape(-1, s * h, w, 2).expand(len(flat), -1, -1, -1)
    read = F.grid_sample(flat, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return read.reshape(*lead, n, c, s, h, w).movedim(-3, -4)


def adjoint_resample(
    filters: Float[Tensor, "*lead n c h w"],
    matrices: Float[Tensor, "*lead s 3 3"],
    blur: float = 0.0,
) -> Float[Tensor, "*lead n s c h w"]:
    """Return filters $|T|^{-1} w(T^{-1} q)$, whose products with x are those of w with $T x$."""
    inverse = torch.linalg.inv_ex(matrices)[0]
    (a, b), (c, d) = (row.unbind(-1) for row in inverse[..., :2, :2].unbind(-2))
    area = (a * d - b * c).abs().to(filters.dtype)[..., None, :, None, None, None]
    resampled: Tensor = resample(filters, inverse, blur) * area
    return resampled


def act(
    x: Float[Tensor, "*lead n d"], matrices: Float[Tensor, "*lead s e e"]
) -> Float[Tensor, "*lead n s d"]:
    """Return every vector under every map: linear (e = d) or affine (e = d + 1, homogeneous)."""
    d, e = x.shape[-1], matrices.shape[-1]
    if matrices.shape[-2] != e or e not in (d, d + 1):
        raise ValueError(
            f"Maps of vectors with {d} entries must be {d} x {d} (linear) or {d + 1} x {d + 1} "
            f"(affine), got {list(matrices.shape[-2:])}."
        )
    maps = matrices.to(x.dtype)
    moved = torch.einsum("...sij,...nj->...nsi", maps[..., :d, :d], x)
    return moved if e == d else moved + maps[..., :d, d].unsqueeze(-3)


def check_images(images: Tensor) -> None:
    """Raise ValueError unless images are floating-point numbers [..., n, c, h, w]."""
    if images.dim() < 4 or not images.is_floating_point():
        raise ValueError(
            "Images must be floating-point tensors [n, channels, height, width], got "
            f"{list(images.shape)} of {images.dtype}. Reshape or convert them, or use an action on "
            "vectors."
        )


def _check_maps(matrices: Tensor, lead: torch.Size) -> Tensor:
    if matrices.dim() < 3 or matrices.shape[-2:] != (3, 3) or not matrices.shape[-3]:
        raise ValueError(
            "Affine maps of the plane must have shape [..., s, 3, 3] with s >= 1, got "
            f"{list(matrices.shape)}."
        )
    if matrices.shape[:-3] not in (lead, torch.Size()):
        raise ValueError(
            f"The maps must have the leading dimensions {list(lead)} of the images or none, got "
            f"{list(matrices.shape[:-3])}."
        )
    return matrices


def _places(maps: Tensor, h: int, w: int) -> Float[Tensor, "b h w 2"]:
    """Return where each pixel reads, in torch's coordinates: -1 and 1 are the image borders."""
    affine = maps[..., :2, :].reshape(-1, 2, 3)
    if h != w:  # torch's vertical unit is half the height, that of the maps half the width
        affine = affine * affine.new_tensor([[1, h / w, 1], [w / h, 1, w / h]])
    return F.affine_grid(affine, [len(affine), 1, h, w], align_corners=False)


def _blurred(images: Float[Tensor, "n c h w"], sigma: float) -> Float[Tensor, "n c h w"]:
    """Apply a separable Gaussian filter with zeros outside."""
    radius = max(1, math.ceil(3 * sigma))
    steps = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
    taps = (-0.5 * (steps / sigma).square()).softmax(0)
    flat = images.reshape(-1, 1, *images.shape[-2:])
    flat = F.conv2d(flat, taps.reshape(1, 1, -1, 1), padding=(radius, 0))
    flat = F.conv2d(flat, taps.reshape(1, 1, 1, -1), padding=(0, radius))
    return flat.reshape(images.shape)
