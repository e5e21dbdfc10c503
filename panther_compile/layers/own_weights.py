"""Weights that a module's own forward multiplies by, as layers that do it.

    torch.bmm(x, self.w1)            w1 (n, I, O) as n linear layers: `Matrices`
    F.linear(x[rows], self.w2[e])    w2 (n, O, I) likewise
    super().forward(pad(x))          the weight of a convolution as one: `Kernel`
    super().forward(ids) * self.s    the weight of an embedding as one: `Table`
    x @ self.w                       w (I, O) as a linear layer: `Matrix`
    F.linear(x, self.w, self.b)      w (O, I) likewise, with its bias

The module keeps its class and its forward. Products with what it finds under the name of the parameter are
calls of the layers, whatever they have been replaced by.
"""

from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from panther_compile.config import OF_CLASS
from panther_compile.errors import FactoredWeightError
from panther_compile.layers.factor import Factor, StandsForWeight, of_values
from panther_compile.layers.lazy_weight import REFUSED
from panther_compile.layers.matrix_stacks import parts_of_stack, stack_of_parts
from panther_compile.layers.weight_products import KernelFactor, MatrixFactor, TableFactor

_WRITTEN = ("data", "grad", "requires_grad")
_DENSE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


@dataclass(frozen=True, slots=True)
class Lifted:
    """The place in the dense model of the tensor of a layer that stands for a parameter.

    Attributes:
        parameter: the name of the parameter.
        place: of one matrix of it; None for all of it.
        transposed: whether that matrix is (I, O).
    """

    parameter: str
    place: int | None = None
    transposed: bool = False


class OwnWeight(StandsForWeight, nn.Module):
    """Layers that stand for a parameter of the module that holds this one under the parameter's name.

    Attributes:
        order: the names of all parameters that the module had.
        marks: whether the module was said to be initialized for this.
    """

    order: tuple[str, ...] = ()
    marks: bool = False

    @abstractmethod
    def factor(self) -> Factor:
        """What the forward of that module multiplies by."""

    @abstractmethod
    def dense(self) -> nn.Parameter | None:
        """The parameter that it stands for; None if a layer was replaced."""

    @abstractmethod
    def tensors(self, parameter: str) -> dict[str, Lifted]:
        """Places in the dense model of the tensors of its layers, by their names in this one.

        Args:
            parameter: the name of what it stands for.
        """

    def other_names(self, parameter: str) -> tuple[str, ...]:
        """Names that its layers may be asked for by, besides their own."""
        return (parameter,)

    def __getattr__(self, name: str) -> Any:
        """See `factor`: whatever a forward asks of a parameter."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not self.__dict__.get("_modules"):
                raise
            return getattr(self.factor(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what would be written to the parameter.

        Raises:
            FactoredWeightError: see there.
        """
        if name in _WRITTEN and not (name == "requires_grad" and value == self.requires_grad):
            raise FactoredWeightError(REFUSED.format(f"Setting {name}"))
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Leave out what the module around has saved under the name of the parameter, which is nowhere."""
        destination.pop(prefix.removesuffix("."), None)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    @abstractmethod
    def stay_in(self, module: nn.Module) -> None:
        """Share no tensor with a module, or with what else it held, some layers having been replaced.

        Args:
            module: that holds this one.
        """

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """See `Tensor.to`: the forward asks it. What moves a model does so with the modules around."""
        return self.factor().to(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.factor()[key]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `factor`."""
        args, kwargs = tree_map_only(OwnWeight, _factor_of, (args, kwargs or {}))
        return func(*args, **kwargs)


class Matrices(OwnWeight):
    """The matrices of a 3-D parameter (n, O, I), or (n, I, O), each a linear layer, by its number.

    Args:
        stack: the parameter.
        transposed: whether it is (n, I, O).

    Attributes:
        sizes: n, I and O.
    """

    def __init__(self, stack: nn.Parameter, *, transposed: bool) -> None:
        super().__init__()
        count, one, other = stack.shape
        self.transposed, self.sizes = transposed, (count, *((one, other) if transposed else (other, one)))
        for place, layer in enumerate(parts_of_stack(stack, None, transposed=transposed)):
            self._modules[str(place)] = layer

    @property
    def layers(self) -> list[Any]:
        """Layers in the order of the matrices."""
        return list(self._modules.values())

    def factor(self) -> Factor:
        """See `OwnWeight`."""
        return MatrixFactor(self.layers, self.sizes[1:], self.transposed)

    def dense(self) -> nn.Parameter | None:
        """See `OwnWeight`."""
        if not all(type(layer) is nn.Linear for layer in self.layers):
            return None
        return stack_of_parts(self.layers, transposed=self.transposed)[0]

    def stay_in(self, module: nn.Module) -> None:
        """See `OwnWeight`; layers that were not replaced held views of the parameter."""
        for layer in self.layers:
            if type(layer) is nn.Linear and not _is_alone(layer.weight):
                layer.weight.data = layer.weight.data.clone(memory_format=torch.contiguous_format)

    def tensors(self, parameter: str) -> dict[str, Lifted]:
        """See `OwnWeight`."""
        return {
            f"{parameter}.{place}.weight": Lifted(parameter, place, self.transposed)
            for place in range(len(self.layers))
        }


class OneLayer(OwnWeight):
    """A parameter as the weight of one layer, which may have the module's bias too while it is fitted.

    Args:
        module: whose parameter it stands for.
        layer: of its sizes, on the meta device.
        weight: the parameter, as the layer has it.
        bias: the name of the parameter that the module adds to the layer's output, None for none.

    Attributes:
        layer: that one, with this weight.
        bias_name: that name.
        given_bias: that parameter, in whose place the layer has another while it is fitted; None before and
            after, and where the module adds what it has itself.
        transposed: whether the parameter is (I, O).
    """

    transposed = False

    def __init__(
        self, module: nn.Module, layer: nn.Module, weight: nn.Parameter | None, bias: str | None
    ) -> None:
        super().__init__()
        self.layer, self.bias_name = layer, bias
        setattr(self.layer, OF_CLASS, type(module))
        given = None if bias is None else module._parameters[bias]
        self.layer._parameters["weight"] = weight
        if given is not None:
            self.layer._parameters["bias"] = given
        self.__dict__["given_bias"] = given  # not registered: it is the module's

    def dense(self) -> nn.Parameter | None:
        """See `OwnWeight`."""
        return self.layer._parameters["weight"] if type(self.layer) in _DENSE else None

    def stay_in(self, module: nn.Module) -> None:
        """See `OwnWeight`; the bias, as it was fitted, is the module's again, which passes it."""
        bias: Any = None if self.bias_name is None else self.layer.bias
        if bias is not None:
            assert self.bias_name is not None
            assert isinstance(bias, nn.Parameter)
            module._parameters[self.bias_name] = bias
            for part in self.layer.modules():
                if part._parameters.get("bias") is bias:
                    part._parameters["bias"] = None
        self.__dict__["given_bias"] = None

    def tensors(self, parameter: str) -> dict[str, Lifted]:
        """See `OwnWeight`."""
        holder, dot, _ = parameter.rpartition(".")
        found = {f"{parameter}.layer.weight": Lifted(parameter, None, self.transposed)}
        if self.bias_name is not None:
            found[f"{parameter}.layer.bias"] = Lifted(f"{holder}{dot}{self.bias_name}")
        return found

    def other_names(self, parameter: str) -> tuple[str, ...]:
        """See `OwnWeight`; that of the module too, where the parameter is called its weight."""
        holder, _, name = parameter.rpartition(".")
        return (parameter, holder) if name == "weight" else (parameter,)


class Kernel(OneLayer):
    """The weight of a convolution, as one without padding.

    Args:
        conv: a subclass of nn.Conv1d, nn.Conv2d or nn.Conv3d.
        base: which of them.
    """

    def __init__(self, conv: nn.Module, base: type[nn.Conv1d | nn.Conv2d | nn.Conv3d]) -> None:
        sizes = (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, 0, conv.dilation)
        has_bias = conv._parameters.get("bias") is not None
        layer = base(*sizes, conv.groups, has_bias, device="meta")  # type: ignore[arg-type]
        super().__init__(conv, layer, conv._parameters["weight"], "bias" if has_bias else None)

    def factor(self) -> Factor:
        """See `OwnWeight`."""
        return KernelFactor(self.layer, self.given_bias)


class Table(OneLayer):
    """The weight of an embedding, as one.

    Args:
        table: a subclass of nn.Embedding.
    """

    def __init__(self, table: nn.Embedding) -> None:
        layer = nn.utils.skip_init(
            nn.Embedding,
            table.num_embeddings,
            table.embedding_dim,
            table.padding_idx,
            scale_grad_by_freq=table.scale_grad_by_freq,
            sparse=table.sparse,
            device="meta",
        )
        super().__init__(table, layer, table._parameters["weight"], None)

    def factor(self) -> Factor:
        """See `OwnWeight`."""
        return TableFactor(self.layer)


class Matrix(OneLayer):
    """A 2-D parameter (O, I), or (I, O), as a linear layer.

    Args:
        module: that holds it.
        name: of the parameter.
        transposed: whether it is (I, O).
        bias: the name of the parameter (O,) that is added in the same call, None for none.

    Attributes:
        sizes: I and O.
    """

    def __init__(self, module: nn.Module, name: str, *, transposed: bool, bias: str | None) -> None:
        matrix = module._parameters[name]
        assert matrix is not None
        weight = nn.Parameter(matrix.detach().t(), matrix.requires_grad) if transposed else matrix
        outputs, inputs = weight.shape
        super().__init__(module, nn.Linear(inputs, outputs, bias is not None, device="meta"), weight, bias)
        self.sizes, self.transposed = (inputs, outputs), transposed

    def factor(self) -> Factor:
        """See `OwnWeight`."""
        return MatrixFactor([self.layer], self.sizes, self.transposed, True, self.given_bias)

    def dense(self) -> nn.Parameter | None:
        """See `OwnWeight`."""
        weight = super().dense()
        if weight is None or not self.transposed:
            return weight
        return nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)


def _is_alone(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory as it is, and there is nothing else."""
    whole = tensor.numel() * tensor.element_size()
    return tensor.is_meta or (tensor.is_contiguous() and tensor.untyped_storage().nbytes() == whole)


def _factor_of(own: OwnWeight) -> Factor:
    return own.factor()


def own_biases(model: nn.Module, layers: Collection[nn.Module]) -> list[nn.Parameter]:
    """The biases of modules of a model for whose weight one of the layers stands."""
    held = [
        module._parameters.get(child.bias_name)
        for module in model.modules()
        for child in module._modules.values()
        if isinstance(child, OneLayer) and child.bias_name is not None
        if any(part in layers for part in child.modules())
    ]
    return [bias for bias in held if bias is not None]


def adds_bias_outside(layer: nn.Module) -> bool:
    """Whether the bias of a layer is that of the module whose weight it stands for."""
    return OF_CLASS in vars(layer) and layer._parameters.get("bias") is not None


def holds_own_weights(module: nn.Module) -> bool:
    """Whether layers stand for parameters of a module."""
    return any(isinstance(child, OwnWeight) for child in module._modules.values())


for _name in ("float", "double", "half", "bfloat16", "cuda", "cpu", "type"):
    setattr(OwnWeight, _name, of_values(_name))
