"""Axes of tensors as lists of segments, and the unknowns they are made of.

Two questions about a channel axis are kept apart:

* *how many* channels: a `Unit`, one unknown integer. Units that must be equal are merged. What becomes a tie in the end is a unit.
* *which* channels: an `Atom`, a run of channels in a certain order. Atoms whose channels must be kept or cut together are merged.

An axis is a tuple of `Segment(atom, inner)`: the channels of the atom in order, each repeated `inner` times (flattening a feature
map of 7x7 gives `inner` 49). Concatenation joins tuples; a split cuts them. Where a cut falls inside an atom, the atom is *bound* to
its two parts, everywhere at once. Unification (`AxisSolver.unify`) walks two axes in step, cutting and merging as it goes.

A unit may be *fixed*, with a reason. Constants are fixed units from the start, so there is no second kind of segment.

An atom is *blurred* when slicing it is not the same as masking it: a channel shuffle interleaves it with others, a layer norm takes
statistics over it. Its size is as free as any other; only the equality of sliced and masked network is not promised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm
from typing import NamedTuple

#: A flattened axis made of more segments than this is fixed: no network needs it, and the walk over it would take long.
MAX_SEGMENTS = 4096


class Unit:
    """How many channels: one unknown integer, `size` in the original network."""

    __slots__ = ("causes", "fixed", "parent", "parts", "size")

    def __init__(self, size: int, fixed: str | None = None) -> None:
        self.size = size
        self.fixed = fixed
        self.parent: Unit | None = None
        self.parts: tuple[tuple[Unit, int], ...] | None = None
        self.causes: dict[str, None] = {}


class Atom:
    """Which channels: a run of `unit` channels in a certain order."""

    __slots__ = ("inexact", "parent", "parts", "unit")

    def __init__(self, unit: Unit, inexact: str | None = None) -> None:
        self.unit = unit
        self.inexact = inexact
        self.parent: Atom | None = None
        self.parts: tuple[Segment, ...] | None = None


class Segment(NamedTuple):
    atom: Atom
    inner: int


Axis = tuple[Segment, ...]


def root(unit: Unit) -> Unit:
    """The unit that stands for this one after all merges."""
    while unit.parent is not None:
        unit = unit.parent
    return unit


def atom_root(atom: Atom) -> Atom:
    """The atom that stands for this one after all merges."""
    while atom.parent is not None:
        atom = atom.parent
    return atom


def leaves(unit: Unit) -> list[tuple[Unit, int]]:
    """The unknowns that a unit is the sum of, with multiplicities."""
    unit = root(unit)
    if unit.parts is None:
        return [(unit, 1)]
    return [(leaf, times * multiple) for part, times in unit.parts for leaf, multiple in leaves(part)]


def _mirror(atom: Atom) -> tuple[Segment, ...] | None:
    """The parts of an atom; where its unit was bound through another atom, parts of its own are made to match."""
    if atom.parts is None:
        unit = root(atom.unit)
        if unit.parts is not None:
            atom.parts = tuple(Segment(Atom(part, atom.inexact), times) for part, times in unit.parts)
    return atom.parts


def expand(axis: Iterable[Segment]) -> Axis:
    """The axis in terms of atoms that are not bound to parts."""
    done: list[Segment] = []
    stack = list(axis)[::-1]
    while stack:
        atom, inner = stack.pop()
        atom = atom_root(atom)
        parts = _mirror(atom)
        if parts is None:
            done.append(Segment(atom, inner))
        else:
            stack.extend(Segment(part.atom, part.inner * inner) for part in reversed(parts))
    return tuple(done)


def axis_size(axis: Iterable[Segment]) -> int:
    """The length of the axis in the original network."""
    return sum(root(atom.unit).size * inner for atom, inner in axis)


def is_fixed(segment: Segment) -> bool:
    return root(segment.atom.unit).fixed is not None


def is_free(axis: Axis) -> bool:
    """Whether any part of the axis can change."""
    return not all(is_fixed(segment) for segment in expand(axis))


def constant(size: int, reason: str = "") -> Axis:
    """An axis that cannot change."""
    return (Segment(Atom(Unit(size, fixed=reason)), 1),)


def unknown(size: int) -> Axis:
    """An axis of which nothing is known yet but its length."""
    return (Segment(Atom(Unit(size)), 1),)


class AxisSolver:
    """Collects what must be equal. All methods work in place on the atoms and units that the axes refer to."""

    # What is fixed, and what is blurred

    def fix(self, axis: Axis, reason: str) -> None:
        for atom, _ in expand(axis):
            unit = root(atom.unit)
            if unit.fixed is None:
                unit.fixed = reason

    def mark_inexact(self, axis: Axis, reason: str) -> None:
        for atom, _ in expand(axis):
            if atom.inexact is None:
                atom.inexact = reason

    # Equal sizes

    def same_size(self, first: Axis, second: Axis, cause: str) -> None:
        """The two axes keep the same length, but need not keep the same channels."""
        self._walk_sizes(
            [(atom.unit, inner) for atom, inner in expand(first)],
            [(atom.unit, inner) for atom, inner in expand(second)],
            cause,
        )

    def _walk_sizes(self, first: list[tuple[Unit, int]], second: list[tuple[Unit, int]], cause: str) -> None:
        # Lengths are the same forwards and backwards: this walk may pair parts in any order, so in the given one.
        left, right = first[::-1], second[::-1]
        while left and right:
            (u, m), (v, k) = left.pop(), right.pop()
            u, v = root(u), root(v)
            if u.parts is not None or v.parts is not None:
                left.extend((leaf, times * m) for leaf, times in reversed(leaves(u)))
                right.extend((leaf, times * k) for leaf, times in reversed(leaves(v)))
                continue
            size_u, size_v = u.size * m, v.size * k
            if u.fixed is not None and v.fixed is not None:
                common = min(size_u, size_v)
                if size_u > common:
                    left.append((Unit(size_u - common, u.fixed), 1))
                if size_v > common:
                    right.append((Unit(size_v - common, v.fixed), 1))
            elif size_u == size_v:
                self._equate(u, m, v, k, cause)
            elif size_u < size_v:
                if v.fixed is not None:
                    u.fixed = v.fixed
                    right.append((Unit(size_v - size_u, v.fixed), 1))
                else:
                    self._split_for(size_u, u, m, v, k, left, right, cause)
            elif u.fixed is not None:
                v.fixed = u.fixed
                left.append((Unit(size_u - size_v, u.fixed), 1))
            else:
                self._split_for(size_v, v, k, u, m, right, left, cause)

    def _split_for(
        self,
        length: int,
        small: Unit,
        small_times: int,
        large: Unit,
        large_times: int,
        small_stack: list[tuple[Unit, int]],
        large_stack: list[tuple[Unit, int]],
        cause: str,
    ) -> None:
        small_stack.append((small, small_times))
        if length % large_times == 0:
            self._split_unit(large, length // large_times)
        else:
            small.fixed = small.fixed or f"{cause}: parts of different length do not line up"
            large.fixed = large.fixed or small.fixed
        large_stack.append((large, large_times))

    def _equate(self, u: Unit, m: int, v: Unit, k: int, cause: str) -> None:
        """`m` times `u` equals `k` times `v`, both leaves and of the same length in the original network."""
        if u is v:
            return
        if m == k:
            v.parent = u
            u.fixed = u.fixed if u.fixed is not None else v.fixed
            u.causes.update(v.causes)
            u.causes[cause] = None
        elif k % m == 0:
            self._bind_unit(u, ((v, k // m),), cause)
        elif m % k == 0:
            self._bind_unit(v, ((u, m // k),), cause)
        else:
            common = lcm(m, k)
            if u.size * m % common:
                u.fixed = u.fixed or f"{cause}: sizes with no common part"
                v.fixed = v.fixed or u.fixed
                return
            w = Unit(u.size * m // common)
            self._bind_unit(u, ((w, common // m),), cause)
            self._bind_unit(v, ((w, common // k),), cause)

    def _bind_unit(self, unit: Unit, parts: tuple[tuple[Unit, int], ...], cause: str) -> None:
        unit.parts = parts
        for part, _ in parts:
            for leaf, _ in leaves(part):
                if unit.fixed is not None and leaf.fixed is None:
                    leaf.fixed = unit.fixed
                leaf.causes.update(unit.causes)
                leaf.causes[cause] = None

    def _split_unit(self, unit: Unit, at: int) -> None:
        first, second = Unit(at, unit.fixed), Unit(unit.size - at, unit.fixed)
        first.causes, second.causes = dict(unit.causes), dict(unit.causes)
        unit.parts = ((first, 1), (second, 1))

    # Equal channels

    def unify(self, first: Axis, second: Axis, cause: str) -> None:
        """The two axes hold the same channels in the same order. Their original lengths must agree."""
        left, right = list(expand(first))[::-1], list(expand(second))[::-1]
        while left and right:
            x, y = left.pop(), right.pop()
            expanded_x, expanded_y = expand((x,)), expand((y,))
            if expanded_x != (x,) or expanded_y != (y,):
                left.extend(reversed(expanded_x))
                right.extend(reversed(expanded_y))
                continue
            if x == y:
                continue
            size_x, size_y = axis_size((x,)), axis_size((y,))
            fixed_x, fixed_y = root(x.atom.unit).fixed, root(y.atom.unit).fixed
            common = min(size_x, size_y)
            if fixed_x is not None and fixed_y is not None:
                if size_x == size_y and x.inner == y.inner:
                    self._merge(x.atom, y.atom, cause)
                    continue
                left.extend(constant(size_x - common, fixed_x) if size_x > common else ())
                right.extend(constant(size_y - common, fixed_y) if size_y > common else ())
            elif size_x == size_y:
                self._match(x, y, cause)
            elif fixed_x is not None and size_x > size_y:
                self.fix((y,), fixed_x)
                left.extend(constant(size_x - size_y, fixed_x))
            elif fixed_y is not None and size_y > size_x:
                self.fix((x,), fixed_y)
                right.extend(constant(size_y - size_x, fixed_y))
            elif size_x < size_y:
                left.append(x)
                right.append(y)
                self._align(y, size_x, x, cause)
            else:
                left.append(x)
                right.append(y)
                self._align(x, size_y, y, cause)

    def _align(self, large: Segment, length: int, small: Segment, cause: str) -> None:
        """Cut the larger segment so that its first part has the length of the smaller one."""
        if length % large.inner == 0:
            self.split_atom(large.atom, length // large.inner)
        else:
            reason = f"{cause}: channels do not line up"
            self.fix((large,), reason)
            self.fix((small,), reason)

    def split_atom(self, atom: Atom, at: int) -> None:
        self._split_unit(root(atom.unit), at)
        _mirror(atom)

    def _match(self, x: Segment, y: Segment, cause: str) -> None:
        """The two segments, leaves of the same length, hold the same channels."""
        (a, m), (b, k) = x, y
        if m == k:
            self._merge(a, b, cause)
        elif k % m == 0:
            self._bind(a, (Segment(b, k // m),), cause)
        elif m % k == 0:
            self._bind(b, (Segment(a, m // k),), cause)
        else:
            size, common = axis_size((x,)), lcm(m, k)
            if size % common:
                reason = f"{cause}: channels do not line up"
                self.fix((x, y), reason)
                return
            c = Atom(Unit(size // common))
            self._bind(a, (Segment(c, common // m),), cause)
            self._bind(b, (Segment(c, common // k),), cause)

    def _merge(self, a: Atom, b: Atom, cause: str) -> None:
        if a is b:
            return
        self._equate(root(a.unit), 1, root(b.unit), 1, cause)
        b.parent = a
        a.inexact = a.inexact or b.inexact

    def _bind(self, atom: Atom, parts: tuple[Segment, ...], cause: str) -> None:
        (part, times), unit = parts[0], root(atom.unit)
        self._equate(unit, 1, root(part.unit), times, cause)
        atom.parts = parts
        if atom.inexact or part.inexact:
            atom.inexact = part.inexact = atom.inexact or part.inexact

    # Shapes

    def cut(self, axis: Axis, lengths: Sequence[int], cause: str) -> list[Axis]:
        """Cut an axis into pieces of the given original lengths."""
        axis = expand(axis)
        if len(axis) == 1 and axis[0].atom.inexact and not is_fixed(axis[0]):
            atom, inner = axis[0]
            size = root(atom.unit).size
            if all(length % size == 0 for length in lengths) and inner > 1:
                # Halves of interleaved channels: each is as long as one of the interleaved parts was.
                return [(Segment(Atom(atom.unit, atom.inexact), length // size),) for length in lengths]
        pieces: list[Axis] = []
        rest = list(axis)[::-1]
        for length in lengths:
            piece: list[Segment] = []
            missing = length
            while missing:
                segment = rest.pop()
                expanded = expand((segment,))
                if expanded != (segment,):
                    rest.extend(reversed(expanded))
                    continue
                size = axis_size((segment,))
                if size <= missing:
                    piece.append(segment)
                    missing -= size
                elif (reason := root(segment.atom.unit).fixed) is not None:
                    piece.extend(constant(missing, reason))
                    rest.extend(constant(size - missing, reason))
                    missing = 0
                else:
                    rest.append(segment)
                    if missing % segment.inner == 0:
                        self.split_atom(segment.atom, missing // segment.inner)
                    else:
                        self.fix((segment,), f"{cause}: a cut falls between channels that belong together")
            pieces.append(tuple(piece))
        return pieces

    def merge(self, axes: Sequence[Axis], cause: str) -> Axis:
        """Several neighbouring axes flattened into one, row-major."""
        sizes = [axis_size(axis) for axis in axes]
        total = 1
        for size in sizes:
            total *= size
        free = [i for i, axis in enumerate(axes) if sizes[i] > 1 and is_free(axis)]
        if not free:
            return constant(
                total, next((r for a in axes for s in expand(a) if (r := root(s.atom.unit).fixed)), "")
            )
        outer = 1
        for size in sizes[: free[0]]:
            outer *= size
        inner = total // outer // sizes[free[0]]
        segments = expand(axes[free[0]])
        if len(free) > 1 or outer * len(segments) > MAX_SEGMENTS:
            reason = f"{cause}: two channel axes are flattened into one"
            for i in free:
                self.fix(axes[i], reason)
            return constant(total, reason)
        return tuple(Segment(atom, times * inner) for atom, times in segments) * outer

    def unmerge(self, axis: Axis, dims: Sequence[int], cause: str) -> list[Axis]:
        """One axis seen as several, row-major: the reverse of `merge`."""
        if len(dims) == 1:
            return [axis]
        if dims[0] == 1:
            return [constant(1), *self.unmerge(axis, dims[1:], cause)]
        axis = expand(axis)
        if not is_free(axis):
            reason = root(axis[0].atom.unit).fixed or ""
            return [constant(dim, reason) for dim in dims]
        trailing = 1
        for dim in dims[1:]:
            trailing *= dim
        if all(inner % trailing == 0 for _, inner in axis):
            first = tuple(Segment(atom, inner // trailing) for atom, inner in axis)
            return [first, *(constant(dim) for dim in dims[1:])]
        return [constant(dims[0]), *self.unmerge(self._row(axis, dims[0], trailing, cause), dims[1:], cause)]

    def _row(self, axis: Axis, rows: int, length: int, cause: str) -> Axis:
        """One row of an axis seen as a matrix; all rows keep the same length."""
        one_atom = len(axis) == 1
        pieces = [expand(piece) for piece in self.cut(axis, [length] * rows, cause)]
        if all(piece == pieces[0] for piece in pieces):
            return pieces[0]
        if one_atom:
            for piece in pieces[1:]:
                self.unify(pieces[0], piece, cause)
            return expand(pieces[0])
        for piece in pieces[1:]:
            self.same_size(pieces[0], piece, cause)
        reason = f"{cause} interleaves channels of different layers"
        for piece in pieces:
            self.mark_inexact(piece, reason)
        return tuple(Segment(Atom(atom.unit, reason), inner) for atom, inner in expand(pieces[0]))

    def grouped(self, axis: Axis, run: int, cause: str) -> Axis:
        """The axis of runs of `run` neighbouring channels, each run kept or cut as a whole."""
        runs = unknown(axis_size(axis) // run)
        self.unify(axis, tuple(Segment(atom, inner * run) for atom, inner in runs), cause)
        return runs
