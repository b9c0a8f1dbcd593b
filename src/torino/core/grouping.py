"""Group patches that share at least δ of their top-k concepts into connected components.

Two sets of k concepts share at least δ of them if and only if they share a subset of size δ. So each patch gets
binom(k, δ) keys, one per subset, and each patch is linked to the previous one with the same key. This graph has the
same components as the paper's token graph, but costs O(N·binom(k, δ)) instead of O(k²N²). All images of a batch are
processed at once, without a loop over patches or pairs. For δ = k a patch has one key and no graph is needed.

Inside this module a silent slot is a slot without an active latent, and a silent patch has only silent slots. Links
between patches are two arrays of equal length, ``source`` and ``target``; their direction does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from torino.core.checks import check_choice, check_type, to_integer
from torino.core.concepts import Concepts
from torino.core.errors import BadParameter, BadTokens
from torino.core.ragged import are_valid_offsets
from torino.core.topk.exact import SILENT

Silent = Literal["group", "keep", "literal"]
Ints = NDArray[np.int64]

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
    lengths = np.array([len(concepts)]) if offsets is None else offsets.diff().cpu().numpy()
    image = np.repeat(np.arange(len(lengths)), lengths)

    symbols, first_silent, silent_patches = _symbols(concepts.indices.cpu().numpy())
    grouped = silent_patches if silent == "group" else np.zeros_like(silent_patches)
    label = _components(symbols, first_silent, delta, image, grouped)
    return _number_groups(label, image, len(lengths), concepts.indices.device)


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


def _symbols(indices: Ints) -> tuple[Ints, int, NDArray[np.bool_]]:
    """Return sorted rows of symbols, the first symbol above the latents, and a mask of the silent patches.

    The silent slots of a row become the symbols ``first_silent``, ``first_silent + 1``, … in their order. With this
    numbering two rows with s_i and s_j silent slots share min(s_i, s_j) of them, and every row is a set.
    """
    is_silent = indices == SILENT
    first_silent = int(indices.max()) + 1
    symbols = indices.copy()
    if is_silent.any():
        symbols = np.where(is_silent, first_silent - 1 + is_silent.cumsum(1), indices)
    symbols.sort(axis=1)
    duplicate = symbols[:, 1:] == symbols[:, :-1]
    if duplicate.any():
        row = int(duplicate.any(1).nonzero()[0][0])
        raise BadParameter(f"Patch {row} has the same concept twice. The top-k concepts of a patch must be distinct.")
    return symbols, first_silent, is_silent.all(1)


def _components(symbols: Ints, first_silent: int, delta: int, image: Ints, grouped: NDArray[np.bool_]) -> Ints:
    """Return the component of each patch; the silent patches in the mask ``grouped`` form one group per image."""
    patches, k = symbols.shape
    if comb(k, delta) > MAX_KEYS:
        return _components_by_product(symbols, first_silent, delta, image, grouped)
    if delta == k:  # one key per patch, which identifies the component
        label = image
        for column in symbols.T:
            label = _combine(label, column, first_silent + k)
        silent_patches = symbols[:, 0] >= first_silent
        # silent patches have no key: they get negative labels, one per image if they are grouped, else one per patch
        silent_label = np.where(grouped, -1 - image, -1 - len(image) - np.arange(patches))
        label = np.where(silent_patches, silent_label, label)
        return np.unique(label, return_inverse=True)[1].reshape(-1)
    subsets = np.array(list(combinations(range(k), delta))).T
    columns = np.ascontiguousarray(symbols.T)  # rows are sorted: active latents come first
    key = np.tile(image, (subsets.shape[1], 1))
    for column in subsets:
        key = _combine(key, columns[column], first_silent + k)
    patch = np.tile(np.arange(patches), subsets.shape[1])
    key = key.reshape(-1)
    if symbols[:, -1].max() >= first_silent:  # a subset needs an active latent
        is_active = (columns[subsets[0]] < first_silent).reshape(-1)
        patch, key = patch[is_active], key[is_active]
    source, target = _link_same_key(patch, key)
    if grouped.any():
        silent_source, silent_target = _link_grouped(grouped, image)
        source, target = np.concatenate([source, silent_source]), np.concatenate([target, silent_target])
    return _connected(source, target, patches)


def _link_same_key(patch: Ints, key: Ints) -> tuple[Ints, Ints]:
    """Link each patch (source) to the previous one with the same key (target), so that keys need no nodes."""
    key, patch = _sort_by_key(key, patch)
    same = (key[1:] == key[:-1]).nonzero()[0]  # a chain of links has the same components as links to the first patch
    return patch[same + 1], patch[same]


def _sort_by_key(key: Ints, patch: Ints) -> tuple[Ints, Ints]:
    """Sort pairs by key, then by patch. Both in one integer, if they fit, are sorted by vector instructions."""
    bits = int(patch.max(initial=0)).bit_length()
    if int(key.max(initial=0)) >= 2 ** (62 - bits):
        order = key.argsort(kind="stable")
        return key[order], patch[order]
    pairs = (key << bits) | patch
    pairs.sort()
    return pairs >> bits, pairs & ((1 << bits) - 1)


def _link_grouped(grouped: NDArray[np.bool_], image: Ints) -> tuple[Ints, Ints]:
    """Link each patch in the mask ``grouped`` to the previous one of its image."""
    patch = grouped.nonzero()[0]
    return _link_same_key(patch, image[patch])


def _components_by_product(
    symbols: Ints, first_silent: int, delta: int, image: Ints, grouped: NDArray[np.bool_]
) -> Ints:
    """Compute the same by counting shared concepts, for k with too many subsets."""
    patches, k = symbols.shape
    is_active = symbols < first_silent
    silent_slots = k - is_active.sum(1)
    rows, slots = is_active.nonzero()
    columns = _combine(image[rows], symbols[rows, slots], first_silent + k)
    _, columns = np.unique(columns, return_inverse=True)
    shape = (patches, int(columns.max(initial=0)) + 1)
    has = csr_array((np.ones(len(rows), np.int32), (rows, columns)), shape=shape)
    has_t = has.T.tocsr()
    label = np.arange(patches)
    source, target = _link_grouped(grouped, image)
    label[source] = target
    for start in range(0, patches, PRODUCT_ROWS):
        shared = (has[start : start + PRODUCT_ROWS] @ has_t).tocoo()  # only pairs that share an active concept
        source, target = shared.coords[0] + start, shared.coords[1]
        linked = shared.data + np.minimum(silent_slots[source], silent_slots[target]) >= delta
        source = np.concatenate([source[linked], np.arange(patches)])
        target = np.concatenate([target[linked], label])  # the links of the blocks so far
        joined = _connected(source, target, patches)
        label = _first_member(joined)
    return np.unique(label, return_inverse=True)[1].reshape(-1)


def _combine(key: Ints, symbol: Ints, base: int) -> Ints:
    """Combine integer keys with another symbol, without collisions or overflow."""
    if int(key.max(initial=0)) >= 2**62 // base:
        key = np.unique(key, return_inverse=True)[1].reshape(key.shape)
    return key * base + symbol


def _connected(source: Ints, target: Ints, patches: int) -> Ints:
    """Return the component of each patch, given the links between patches."""
    source, target = _sort_by_key(source, target)
    starts = np.zeros(patches + 1, np.int32)  # the index type that scipy uses
    np.cumsum(np.bincount(source, minlength=patches), out=starts[1:])
    links = target.astype(np.int32)
    graph = csr_array((np.ones(len(links)), links, starts), shape=(patches, patches))
    _, label = cast(tuple[int, NDArray[Any]], connected_components(graph, directed=False))
    return label.astype(np.int64)


def _first_member(label: Ints) -> Ints:
    """Label each component by its first patch."""
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    return first[inverse]


def _number_groups(label: Ints, image: Ints, images: int, device: torch.device) -> Groups:
    """Renumber components, labeled from 0 without gaps, by first appearance."""
    first = np.empty(int(label.max()) + 1, np.int64)
    first[label[::-1]] = np.arange(len(label) - 1, -1, -1)  # the first patch is written last
    order = first.argsort()
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    counts = np.bincount(image[first], minlength=images)
    return Groups(
        label=torch.from_numpy(rank[label]).to(device),
        sizes=torch.from_numpy(np.bincount(label)[order]).to(device),
        offsets=torch.from_numpy(np.concatenate([[0], counts.cumsum()])),
    )
