"""Group patches that share at least δ of their top-k concepts into connected components.

Two sets of k concepts share at least δ of them if and only if they share a subset of size δ. So each patch gets
binom(k, δ) keys, one per subset, and each patch is linked to the previous one with the same key. This graph has the
same components as the paper's token graph, but costs O(N·binom(k, δ)) instead of O(k²N²). All images of a batch are
processed at once, without a loop over patches or pairs.

Inside this module a silent slot is a slot without an active latent, and a silent patch has only silent slots. Links
between patches are two arrays of equal length, ``source`` and ``target``; their direction does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from torino.core.checks import check_choice, check_type, to_integer
from torino.core.concepts import Concepts
from torino.core.errors import BadParameter, BadTokens
from torino.core.ragged import are_valid_offsets
from torino.core.topk.exact import SILENT

Silent = Literal["group", "keep", "literal"]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

MAX_KEYS = 64  # with more subsets per patch, counting shared concepts by a sparse product is cheaper
PRODUCT_ROWS = 1024  # patches per block of that product; bounds its memory


@dataclass(frozen=True, eq=False)
class Groups:
    """A partition of the patches of one or several images.

    Attributes
    ----------
    label : Tensor of shape (N,), int64
        Group of each patch, numbered by first appearance; groups never span two images.
    sizes : Tensor of shape (G,), int64
        Number of patches of each group.
    offsets : Tensor of shape (images + 1,), int64
        Image i owns groups ``offsets[i]:offsets[i+1]``.
    """

    label: Tensor
    sizes: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        """Return the number of groups, G, over all images."""
        return len(self.sizes)

    @property
    def counts(self) -> Tensor:
        """Number of groups of each image, shape (images,): the output length of a dynamic reduction."""
        return self.offsets.diff()


def group_by_overlap(
    concepts: Concepts, delta: int, *, silent: Silent = "group", offsets: Tensor | None = None
) -> Groups:
    """Group patches that share at least ``delta`` of their top-k concepts.

    Patches i and j are linked when |A_i ∩ A_j| ≥ δ; a group is a connected component (paper, Sec. 3.2).

    A patch may have fewer than k active latents. By default a silent slot is not a concept: it matches only a
    silent slot of the other patch, a link needs at least one active concept in common, and all patches of an
    image without any active concept form one group.

    Parameters
    ----------
    concepts : Concepts
        Top-k latents per patch.
    delta : int
        Minimum number of shared concepts, from 1 to k.
    silent : {"group", "keep", "literal"}
        Rule for patches without an active concept. ``"group"``: they form one group per image. ``"keep"``: each
        forms its own group. ``"literal"`` changes all patches with a silent slot, also those with active concepts:
        every silent slot is filled with the lowest unused latent, as arg-top-k over zeros does (see
        :meth:`Concepts.literal`), and then counts as a concept.
    offsets : Tensor of shape (images + 1,), optional
        First patch of each image, followed by N. Default: all patches belong to one image.

    Returns
    -------
    Groups
        ``label`` of shape (N,), numbered by first appearance in raster order.

    Examples
    --------
    The example of the paper: two patches with different top concepts c1 and c2 that share c3.

    >>> c1, c2, c3 = 1, 2, 3
    >>> top1, top2 = Concepts.of([[c1], [c2]]), Concepts.of([[c1, c3], [c2, c3]])
    >>> group_by_overlap(top1, delta=1).label.tolist()  # k = 1: the top concepts differ
    [0, 1]
    >>> group_by_overlap(top2, delta=1).label.tolist()  # k = 2: c3 is shared
    [0, 0]
    >>> group_by_overlap(top2, delta=2).label.tolist()  # the sets are not identical
    [0, 1]
    """
    check_type("concepts", concepts, Concepts, "the Concepts of some patches")
    if not 1 <= (delta := to_integer("delta", delta)) <= concepts.k:
        raise BadParameter(
            f"delta must be between 1 and k={concepts.k}, got {delta}: "
            "patches cannot share more concepts than each of them has."
        )
    check_choice("silent", silent, Silent)
    if not len(concepts):
        raise BadTokens("There are no patches to group. Give at least one.")
    if offsets is not None and not are_valid_offsets(offsets, len(concepts)):
        raise BadTokens(
            f"offsets must be non-decreasing from 0 to the number of patches, {len(concepts)}; got {offsets.tolist()}."
        )
    if silent == "literal":
        concepts = concepts.literal()
    image = None
    if offsets is not None and len(offsets) > 2:
        image = np.repeat(np.arange(len(offsets) - 1), offsets.diff().cpu().numpy())

    columns, first_silent, silent_patches = _symbols(concepts.indices.cpu().numpy())
    grouped = silent_patches if silent == "group" else None
    if comb(concepts.k, delta) > MAX_KEYS:
        root = _roots_by_product(columns, first_silent, delta, image, grouped)
    else:
        root = _roots(columns, first_silent, delta, image, grouped)
    return _number_groups(root, image, 1 if offsets is None else len(offsets) - 1, concepts.indices.device)


def shared_concepts(concepts: Concepts, groups: Groups) -> Tensor:
    """Return the most common latent among the top k of each group's patches, shape (G,); −1 if all are silent.

    Ties go to the larger summed activation, then to the lowest latent.
    """
    indices, label = concepts.indices.cpu().numpy(), groups.label.cpu().numpy()
    shared = np.full(len(groups), SILENT)
    member, slot = (indices != SILENT).nonzero()
    if len(member):
        latent = indices[member, slot]
        width = int(latent.max()) + 1
        pair, inverse, count = np.unique(label[member] * width + latent, return_inverse=True, return_counts=True)
        values = concepts.values.detach().cpu().double().numpy()[member, slot]
        weight = np.bincount(inverse.reshape(-1), weights=values)
        group, latent = pair // width, pair % width
        best = np.lexsort((latent, -weight, -count, group))  # the last key is the primary one
        group, latent = group[best], latent[best]
        is_first = np.concatenate([[True], group[1:] != group[:-1]])
        shared[group[is_first]] = latent[is_first]
    return torch.from_numpy(shared).to(concepts.indices.device)


def _symbols(indices: Ints) -> tuple[Ints, int, Mask | None]:
    """Return columns of symbols, sorted per patch, the first symbol above the latents, and a mask of silent patches.

    The silent slots of a row become the symbols ``first_silent``, ``first_silent + 1``, … in their order. With this
    numbering two rows with s_i and s_j silent slots share min(s_i, s_j) of them, and every row is a set. The mask is
    None if no patch is silent.
    """
    first_silent, silent_patches = int(indices.max()) + 1, None
    if int(indices.min()) == SILENT:
        is_silent = indices == SILENT
        indices = np.where(is_silent, first_silent - 1 + is_silent.cumsum(1), indices)
        silent_patches = is_silent.all(1)
        silent_patches = silent_patches if silent_patches.any() else None
    columns = np.ascontiguousarray(np.sort(indices, axis=1).T)
    duplicate = columns[1:] == columns[:-1]
    if duplicate.any():
        patch = int(duplicate.any(0).nonzero()[0][0])
        raise BadParameter(f"Patch {patch} has the same concept twice. The top-k concepts of a patch must be distinct.")
    return columns, first_silent, silent_patches


def _roots(columns: Ints, first_silent: int, delta: int, image: Ints | None, grouped: Mask | None) -> Ints:
    """Return the first patch of each patch's component; the silent patches in ``grouped`` form one group per image."""
    k, patches = columns.shape
    subsets = _subsets(k, delta)
    base = first_silent + k
    picked = columns[subsets]
    key, bound = picked[0], base
    for column in picked[1:]:
        key, bound = _combine(key, bound, column, base)
    if image is not None:
        key, bound = _combine(key, bound, image, int(image[-1]) + 1)
    patch = np.broadcast_to(np.arange(patches), key.shape)
    if int(columns[-1].max()) >= first_silent:  # a subset needs an active latent, and rows are sorted
        is_active = picked[0] < first_silent
        key, patch = key[is_active], patch[is_active]
    source, target = _link_same_key(key.reshape(-1), bound, patch.reshape(-1), patches)
    root = np.arange(patches)
    if grouped is not None:
        root = _connect(root, *_link_grouped(grouped, image))
    return _connect(root, source, target)


@lru_cache
def _subsets(k: int, delta: int) -> Ints:
    """Return the subsets of size ``delta`` of ``range(k)``, shape (delta, subsets)."""
    return np.ascontiguousarray(np.array(list(combinations(range(k), delta))).T)


def _combine(key: Ints, bound: int, symbol: Ints, base: int) -> tuple[Ints, int]:
    """Combine keys below ``bound`` with symbols below ``base``, without collisions or overflow."""
    if bound >= 2**62 // base:
        key = np.unique(key, return_inverse=True)[1].reshape(key.shape)
        bound = int(key.max(initial=0)) + 1
    return key * base + symbol, bound * base


def _link_same_key(key: Ints, bound: int, patch: Ints, patches: int) -> tuple[Ints, Ints]:
    """Link each patch (source) to the previous one with the same key (target), so that keys need no nodes."""
    bits = patches.bit_length()
    if bound >= 2 ** (62 - bits):
        order = key.argsort(kind="stable")
        key, patch = key[order], patch[order]
    else:  # both in one integer are sorted by vector instructions
        pairs = (key << bits) | patch
        pairs.sort()
        key, patch = pairs >> bits, pairs & ((1 << bits) - 1)
    same = (key[1:] == key[:-1]).nonzero()[0]  # a chain of links has the same components as links to the first patch
    return patch[same + 1], patch[same]


def _link_grouped(grouped: Mask, image: Ints | None) -> tuple[Ints, Ints]:
    """Link each patch in the mask ``grouped`` to the previous one of its image."""
    patch = grouped.nonzero()[0]
    source, target = patch[1:], patch[:-1]
    if image is None:
        return source, target
    same = image[source] == image[target]
    return source[same], target[same]


def _connect(root: Ints, source: Ints, target: Ints) -> Ints:
    """Join the components of linked patches; return the first patch of each component.

    Each root is hooked to a smaller root that it is linked to, and paths are shortened to length one, until all links
    are inside a component: O(log² N) rounds at most (Liu and Tarjan, 2019), two or three in practice.
    """
    while True:
        one, other = root[source], root[target]
        differs = (one != other).nonzero()[0]
        if not len(differs):
            return root
        one, other, source, target = one[differs], other[differs], source[differs], target[differs]
        np.minimum.at(root, np.maximum(one, other), np.minimum(one, other))
        while (shorter := root[root]).tobytes() != root.tobytes():
            root = shorter


def _roots_by_product(columns: Ints, first_silent: int, delta: int, image: Ints | None, grouped: Mask | None) -> Ints:
    """Compute the same by counting shared concepts, for k with too many subsets."""
    k, patches = columns.shape
    is_active = first_silent > columns.T
    silent_slots = k - is_active.sum(1)
    rows, slots = is_active.nonzero()
    key = columns[slots, rows]
    if image is not None:
        key, _ = _combine(key, first_silent, image[rows], int(image[-1]) + 1)
    key = np.unique(key, return_inverse=True)[1]
    shape = (patches, int(key.max(initial=0)) + 1)
    has = csr_array((np.ones(len(rows), np.int32), (rows, key)), shape=shape)
    has_t = has.T.tocsr()
    root = np.arange(patches)
    if grouped is not None:
        root = _connect(root, *_link_grouped(grouped, image))
    for start in range(0, patches, PRODUCT_ROWS):
        shared = (has[start : start + PRODUCT_ROWS] @ has_t).tocoo()  # only pairs that share an active concept
        source, target = shared.coords[0] + start, shared.coords[1]
        linked = shared.data + np.minimum(silent_slots[source], silent_slots[target]) >= delta
        root = _connect(root, source[linked], target[linked])
    return root


def _number_groups(root: Ints, image: Ints | None, images: int, device: torch.device) -> Groups:
    """Number components, given by their first patch, by first appearance."""
    is_first = root == np.arange(len(root))
    label = (is_first.cumsum() - 1)[root]
    sizes = np.bincount(label)
    counts = [len(sizes)] if image is None else np.bincount(image[is_first], minlength=images)
    return Groups(
        label=torch.from_numpy(label).to(device),
        sizes=torch.from_numpy(sizes).to(device),
        offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
    )
