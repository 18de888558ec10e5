"""How weights and moments are kept, as one name that can be typed: ``split8+int8``.

    fp32            fp32 weights
    fp32-master     16-bit weights and fp32 masters
    split split8    16-bit weights, and 16 or 8 more bits of each
    stochastic      16-bit weights, rounded by chance
    none            16-bit weights and nothing else

each with its moments in fp32, or ``+bf16``, or ``+int8``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfstep.errors import ArgumentError

WEIGHTS = ("fp32", "fp32-master", "split", "split8", "stochastic", "none")
MOMENTS = ("fp32", "bf16", "int8")
# The rows of the table of bytes per parameter, from the most to the fewest.
DEFAULTS = ("fp32", "fp32-master", "split", "split+bf16", "split+int8", "split8+int8", "stochastic+int8")


@dataclass(frozen=True)
class Storage:
    """How weights and moments are kept.

    Args:
        weights: of `WEIGHTS`.
        moments: of `MOMENTS`.

    Example:
        >>> storage = Storage.parse("split8+int8")
        >>> storage.arguments, str(storage), str(Storage.parse("fp32+fp32"))
        ({'master': 'split8', 'moments': 'int8'}, 'split8+int8', 'fp32')
    """

    weights: str
    moments: str = "fp32"

    @classmethod
    def parse(cls, text: str) -> Storage:
        """Read a name.

        Raises:
            ArgumentError: there is no such storage.
        """
        weights, plus, moments = text.partition("+")
        if weights not in WEIGHTS or (plus and moments not in MOMENTS):
            raise ArgumentError(
                asked=f"the storage {text!r}",
                true=f"weights are kept as {', '.join(WEIGHTS)}; moments as {', '.join(MOMENTS)}",
                why="a storage is one of the first, then a plus sign and one of the second unless they are fp32",
                fix="pass, for example, --storage split8+int8",
            )
        return cls(weights, moments or "fp32")

    def __str__(self) -> str:
        return self.weights if self.moments == "fp32" else f"{self.weights}+{self.moments}"

    @property
    def arguments(self) -> dict[str, str]:
        """Of the optimizer's constructor."""
        master = {} if self.weights == "fp32" else {"master": self.weights.removesuffix("-master")}
        return {**master, "moments": self.moments}

    def weight_dtype(self, half_dtype: torch.dtype) -> torch.dtype:
        """Of the weights, where the 16-bit ones are ``half_dtype``."""
        return torch.float32 if self.weights == "fp32" else half_dtype
