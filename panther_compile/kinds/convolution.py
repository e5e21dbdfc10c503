"""What the kinds of convolutions, transposed ones too, have in common."""

from typing import Any, ClassVar

from torch import nn

from panther_compile.factorization.conv2d import is_depthwise
from panther_compile.kinds.base import Kind
from panther_compile.kinds.match import why_not_plain
from panther_compile.kinds.plain_form import plain_form


class ConvolutionKind(Kind):
    """Convolutions of one of torch's classes, the one that the sketched layer stands for.

    Attributes:
        methods: names of those that define what the class computes.
    """

    why_no_ties = "convolutions that share a kernel stay dense"
    methods: ClassVar[tuple[str, ...]] = ("forward", "_conv_forward")

    @property
    def dense_type(self) -> type[nn.Module]:
        """The class of torch."""
        return self.layers[0].dense_type

    def matches(self, module: nn.Module) -> str | None:
        """Called by the name of torch's class."""
        return self.dense_type.__name__ if isinstance(module, self.dense_type) else None

    def why_not(self, module: nn.Module) -> str | None:
        """See `Kind.why_not`."""
        dense: Any = module
        if is_depthwise(dense.in_channels // dense.groups, dense.groups):
            return "depthwise: each filter sees one channel, a low rank has nothing to share"
        return why_not_plain(
            plain_form(module),
            self.dense_type,
            tensors=frozenset({"weight", "bias"}),
            methods=self.methods,
            sizes=(1, 1, 1),
        )
