"""Grouping: patches that share at least δ of their top-k concepts, joined into connected components.

Two sets of k concepts share at least δ of them exactly when they share a subset of size δ. So each patch gets
C(k, δ) keys, one per subset, and patches linked to the next one with the same key have the components of the
paper's token graph: O(N·C(k, δ)) instead of O(k²N²), for all images of a batch at once and with no loop over
patches or pairs. For δ = k a patch has one key and no graph is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torino.core.concepts import Concepts
from torino.core.errors import BadParameter, BadTokens
from torino.core.ragged import fits
from torino.core.topk.exact import SILENT

Silent = Literal["group", "keep", "literal"]
Ints = NDArray[np.int64]

MOST_KEYS = 64  # beyond this many subsets a patch, counting shared concepts by a sparse product is cheaper
PRODUCT_ROWS = 1024  # patches of one block of that product, which bounds its memory


@dataclass(frozen=True, eq=False)
class Groups:
    """A partition of the patches of one or several images.

    Attributes
    ----------
    label : Tensor of shape (N,), int64
        Group of each patch, numbered by first appearance; groups never span two images.
    sizes : Tensor of shape (G,), int64
        Patches in each group.
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
        """Groups of each image, shape (images,): the length a dynamic reduction gives it."""
        return self.offsets.diff()


def group_by_overlap(
    concepts: Concepts, delta: int, *, silent: Silent = "group", offsets: Tensor | None = None
) -> Groups:
    """Group patches that share at least ``delta`` of their strongest concepts.

    Patches i and j are linked when |A_i ∩ A_j| ≥ δ; a group is a connected component (paper, Sec. 3.2).

    A patch may have fewer than k active latents. By default a silent slot is no concept: it agrees only with
    a silent slot of the other patch, a link needs at least one real concept in common, and the patches of an
    image with no active concept at all form one group.

    Parameters
    ----------
    concepts : Concepts
        Top-k latents per patch.
    delta : int
        Least number of shared concepts, from 1 to k.
    silent : {"group", "keep", "literal"}
        ``"keep"``: a patch with no active concept stays a group of its own. ``"literal"``: silent slots are
        filled with the lowest latents first, as arg-top-k over zeros does (see :meth:`Concepts.literal`).
    offsets : Tensor of shape (images + 1,), optional
        Where each image begins among the patches; without it they are one image.

    Returns
    -------
    Groups
        ``label`` of shape (N,), numbered by first appearance in raster order.

    Examples
    --------
    The paper's own: two patches whose strongest concepts c1 and c2 differ, and which share c3.

    >>> c1, c2, c3 = 1, 2, 3
    >>> one, two = Concepts.of([[c1], [c2]]), Concepts.of([[c1, c3], [c2, c3]])
    >>> group_by_overlap(one, delta=1).label.tolist()  # k = 1: distinct argmax buckets
    [0, 1]
    >>> group_by_overlap(two, delta=1).label.tolist()  # k = 2: c3 is shared
    [0, 0]
    >>> group_by_overlap(two, delta=2).label.tolist()  # the sets are not identical
    [0, 1]
    """
    if not 1 <= delta <= concepts.k:
        raise BadParameter(
            f"delta must be between 1 and k={concepts.k}, got {delta}: "
            "patches cannot share more concepts than each one keeps."
        )
    if silent not in get_args(Silent):
        raise BadParameter(f"silent must be one of {', '.join(map(repr, get_args(Silent)))}, got {silent!r}.")
    if not len(concepts):
        raise BadTokens("There are no patches to group. An image has at least one.")
    if offsets is not None and not fits(offsets, len(concepts)):
        raise BadTokens(f"offsets must rise from 0 to the number of patches, {len(concepts)}.")
    if silent == "literal":
        concepts = concepts.literal()
    lengths = np.array([len(concepts)]) if offsets is None else offsets.diff().cpu().numpy()
    image = np.repeat(np.arange(len(lengths)), lengths)

    symbols, real, mute = _symbols(concepts.indices.cpu().numpy())
    label = _components(symbols, real, delta, image, mute if silent == "group" else np.zeros_like(mute))
    return _numbered(label, image, len(lengths), concepts.indices.device)


def shared_concepts(concepts: Concepts, groups: Groups) -> Tensor:
    """The latent that most members of each group have among their top k, shape (G,); −1 where all are silent.

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
        best = np.lexsort((latent, -weight, -count, group))  # the last key leads
        group, latent = group[best], latent[best]
        leads = np.concatenate([[True], group[1:] != group[:-1]])
        shared[group[leads]] = latent[leads]
    return torch.from_numpy(shared).to(concepts.indices.device)


def _symbols(indices: Ints) -> tuple[Ints, int, NDArray[np.bool_]]:
    """Sort each row, with R + t for its t-th silent slot, R above all latents; R; and which rows are all silent.

    Numbering the silent slots makes two rows share min(s_i, s_j) of them, and keeps every row a set.
    """
    is_silent = indices == SILENT
    real = int(indices.max()) + 1
    symbols = np.where(is_silent, real - 1 + is_silent.cumsum(1), indices) if is_silent.any() else indices.copy()
    symbols.sort(axis=1)
    twice = symbols[:, 1:] == symbols[:, :-1]
    if twice.any():
        row = int(twice.any(1).nonzero()[0][0])
        raise BadParameter(f"Patch {row} names one concept twice; the top-k concepts of a patch are distinct.")
    return symbols, real, is_silent.all(1)


def _components(symbols: Ints, real: int, delta: int, image: Ints, together: NDArray[np.bool_]) -> Ints:
    """Label the patches by component; patches that are ``together`` count as linked within their image."""
    patches, k = symbols.shape
    if comb(k, delta) > MOST_KEYS:
        return _components_by_product(symbols, real, delta, image, together)
    if delta == k:  # one key a patch, and the key is the component
        label = image
        for column in symbols.T:
            label = _paired(label, column, real + k)
        mute = symbols[:, 0] >= real  # nothing but silence: no key, so a label below all keys
        label = np.where(mute, np.where(together, -1 - image, -1 - len(image) - np.arange(patches)), label)
        return np.unique(label, return_inverse=True)[1].reshape(-1)
    subsets = np.array(list(combinations(range(k), delta)))
    rows, which = (symbols[:, subsets[:, 0]] < real).nonzero()  # sorted rows: the first symbol is real, if any is
    key = image[rows]
    for column in subsets.T:
        key = _paired(key, symbols[rows, column[which]], real + k)
    linked, to = _chained(rows, key)
    extra = together.nonzero()[0]
    later, earlier = _chained(extra, image[extra])
    return _linked(np.concatenate([linked, later]), np.concatenate([to, earlier]), patches)


def _chained(patch: Ints, key: Ints) -> tuple[Ints, Ints]:
    """Link every patch to the one before it that has the same key: no nodes for keys are needed."""
    order = key.argsort(kind="stable")
    key, patch = key[order], patch[order]
    same = key[1:] == key[:-1]  # neighbours with one key: a chain of links joins as well as links to the first do
    return patch[1:][same], patch[:-1][same]


def _components_by_product(symbols: Ints, real: int, delta: int, image: Ints, together: NDArray[np.bool_]) -> Ints:
    """Do the same by counting shared concepts, for k so large that subsets would be too many."""
    from scipy.sparse import csr_array

    patches, k = symbols.shape
    is_real = symbols < real
    spare = k - is_real.sum(1)
    rows, slots = is_real.nonzero()
    columns = _paired(image[rows], symbols[rows, slots], real + k)
    _, columns = np.unique(columns, return_inverse=True)
    shape = (patches, int(columns.max(initial=0)) + 1)
    has = csr_array((np.ones(len(rows), np.int32), (rows, columns)), shape=shape)
    has_t = has.T.tocsr()
    extra = together.nonzero()[0]
    label = np.arange(patches)
    later, earlier = _chained(extra, image[extra])
    label[later] = earlier
    for start in range(0, patches, PRODUCT_ROWS):
        shared = (has[start : start + PRODUCT_ROWS] @ has_t).tocoo()  # only pairs with a real concept in common
        i, j = shared.coords[0] + start, shared.coords[1]
        linked = shared.data + np.minimum(spare[i], spare[j]) >= delta
        every = np.arange(patches)
        label = _first_member(_linked(np.concatenate([i[linked], every]), np.concatenate([j[linked], label]), patches))
    return np.unique(label, return_inverse=True)[1].reshape(-1)


def _paired(key: Ints, symbol: Ints, base: int) -> Ints:
    """Fold another symbol into integer keys, without collisions and without overflow."""
    if int(key.max(initial=0)) >= 2**62 // base:
        key = np.unique(key, return_inverse=True)[1].reshape(-1)
    return key * base + symbol


def _linked(left: Ints, right: Ints, patches: int) -> Ints:
    """Component labels of patches, given the links between them."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    order = left.argsort(kind="stable")
    starts = np.searchsorted(left[order], np.arange(patches + 1)).astype(np.int32)  # the types that scipy works in
    graph = csr_array((np.ones(len(left)), right[order].astype(np.int32), starts), shape=(patches, patches))
    _, label = cast(tuple[int, NDArray[Any]], connected_components(graph, directed=False))
    return label.astype(np.int64)


def _first_member(label: Ints) -> Ints:
    """Name each component by its first patch."""
    _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
    return first[inverse]


def _numbered(label: Ints, image: Ints, images: int, device: torch.device) -> Groups:
    """Number components, labelled from 0 without gaps, by first appearance."""
    first = np.empty(int(label.max()) + 1, np.int64)
    first[label[::-1]] = np.arange(len(label) - 1, -1, -1)  # the last one written is the first patch
    order = first.argsort()
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    counts = np.bincount(image[first], minlength=images)
    return Groups(
        label=torch.from_numpy(rank[label]).to(device),
        sizes=torch.from_numpy(np.bincount(label)[order]).to(device),
        offsets=torch.from_numpy(np.concatenate([[0], counts.cumsum()])),
    )
