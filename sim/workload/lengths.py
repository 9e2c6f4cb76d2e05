"""Prompt and output lengths as joint quantiles: a table of figures instead of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTable:
    """The quantile function of prompt lengths, and that of output lengths for each class of prompts.

    Classes have equal shares: with 12 classes, class 0 is the shortest twelfth of the prompts. The dependence of
    output on input is thus kept, also where it is not monotone.
    """

    input_probabilities: tuple[float, ...]
    """From 0 to 1, increasing."""
    input_quantiles: tuple[int, ...]
    """Prompt length in tokens at each of `input_probabilities`."""
    output_probabilities: tuple[float, ...]
    """From 0 to 1, increasing."""
    output_quantiles: tuple[tuple[int, ...], ...]
    """Output length in tokens at each of `output_probabilities`, one row for each class of prompts."""

    def sample(self, input_ranks: Floats, output_ranks: Floats) -> tuple[Ints, Ints]:
        """Prompt and output lengths `[n]` in tokens from uniform ranks `[n]` in `[0, 1)`.

        Between quantiles the logarithm is interpolated: tails are long, and a straight line would make them too heavy.
        """
        import numpy as np

        inputs = np.exp(np.interp(input_ranks, self.input_probabilities, np.log(self.input_quantiles)))
        classes = class_of(input_ranks, len(self.output_quantiles))
        outputs = np.empty_like(inputs)
        for number, quantiles in enumerate(self.output_quantiles):
            here = classes == number
            outputs[here] = np.exp(np.interp(output_ranks[here], self.output_probabilities, np.log(quantiles)))
        return np.rint(inputs).astype(np.int64), np.rint(outputs).astype(np.int64)


def class_of(input_ranks: Floats, num_classes: int) -> Ints:
    """Class number `[n]` of ranks in `[0, 1)`, for classes of equal share."""
    import numpy as np

    return np.minimum((input_ranks * num_classes).astype(np.int64), num_classes - 1)
