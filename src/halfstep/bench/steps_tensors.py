"""Which tensors a step goes over: their number and shapes.

    150           so many tensors of all parameters together, half of them ten times as large as the other half
    2048x16K      so many tensors, all of this size (K = 1024)

Method: all are matrices, since int8 moments need rows. Of a size's factorisations the one is taken that needs the
fewest groups of int8 scales, and of these the one that is nearest to a square.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

from halfstep.errors import ArgumentError
from halfstep.kernels.storage import GROUP

DEFAULT_PARAMS, DEFAULT_TENSORS = 10_000_000, "150"
CASES = ("2048x16K", "10000x1000")  # many small tensors: what a launch for each of them would cost
Shape = tuple[int, int]
_RATIO = 10
_UNITS = {"": 1, "K": 2**10, "M": 2**20}


def read_tensors(text: str, num_params: float | None = None) -> tuple[Shape, ...]:
    """The shapes of all tensors.

    Args:
        text: ``"150"``, or ``"2048x16K"``.
        num_params: of all together; only with the first. None: `DEFAULT_PARAMS`.

    Raises:
        ArgumentError: the text is neither, or there are too few parameters for so many tensors.

    Example:
        >>> read_tensors("4", 5280), read_tensors("2x1K")
        (((75, 32), (7, 32), (75, 32), (7, 32)), ((32, 32), (32, 32)))
    """
    found = re.fullmatch(r"(\d+)(?:x(\d+)([KM]?))?", text.strip(), re.IGNORECASE)
    if found is None or not int(found[1]):
        raise _unreadable(text)
    number = int(found[1])
    if found[2] is None:
        return _mixed(number, DEFAULT_PARAMS if num_params is None else num_params)
    if num_params is not None:
        raise ArgumentError(
            asked=f"params={num_params:g} and tensors={text!r}",
            true="the second says how many parameters each tensor has",
            why="together they say it twice",
            fix="leave --params out, or pass the number of tensors alone",
        )
    size = int(found[2]) * _UNITS[(found[3] or "").upper()]
    if not size:
        raise _unreadable(text)
    return (_matrix(size),) * number


def _unreadable(text: str) -> ArgumentError:
    return ArgumentError(
        asked=f"tensors={text!r}",
        true="it is a number of tensors, or a number and the size of each, as in 2048x16K",
        why="a step goes over whole tensors with something in them",
        fix=f"pass --tensors {DEFAULT_TENSORS}, or one of the cases of many small tensors: {', '.join(CASES)}",
    )


def _mixed(number: int, num_params: float) -> tuple[Shape, ...]:
    pairs = [(_RATIO, 1)[place % 2] for place in range(number)]
    if not (math.isfinite(num_params) and num_params >= sum(pairs)):
        raise ArgumentError(
            asked=f"params={num_params:g} in {number} tensors",
            true=f"half of the tensors are {_RATIO} times as large as the others, which makes {sum(pairs)} at least",
            why="every tensor has a parameter",
            fix=f"pass --params {DEFAULT_PARAMS:g}, or fewer --tensors",
        )
    size = int(num_params // sum(pairs))
    columns = min(math.isqrt(size * _RATIO), size)  # the large ones are squares, the small ones flat
    if columns > GROUP:
        columns -= columns % GROUP  # whole groups in a row
    return tuple((size * factor // columns, columns) for factor in pairs)


@functools.cache
def _matrix(size: int) -> Shape:
    """Rows and columns of exactly ``size`` elements."""
    low = [width for width in range(1, math.isqrt(size) + 1) if size % width == 0]

    def cost(columns: int) -> tuple[int, float]:
        num_groups = size // columns * -(-columns // GROUP)
        return num_groups, abs(math.log(columns**2 / size))

    columns = min((*low, *(size // width for width in low)), key=cost)
    return size // columns, columns


def in_words(shapes: Sequence[Shape]) -> str:
    """Number of parameters and tensors.

    Example:
        >>> in_words(((1000, 1000),) * 3)
        '3 M parameters in 3 tensors'
    """
    num_params = sum(rows * columns for rows, columns in shapes)
    large = f"{num_params / 1e6:.3g} M" if num_params >= 1e5 else str(num_params)
    return f"{large} parameters in {len(shapes)} tensors"
