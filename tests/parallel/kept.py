"""What a checkpointed forward holds of its results."""

from torch.utils import _pytree as pytree

from panther_compile.partition.graph.narrowing import storage


def kept_bytes(contexts, call, *args):
    """The bytes that the contexts of a forward and of its recomputation hold behind the forward."""
    forward, again = contexts
    with forward:
        call(*args)
    leaves = pytree.tree_leaves(dict(again._again.storage))
    tensors = [one.get_val(True) for one in leaves if hasattr(one, "get_val")]
    return sum({storage(one): one.untyped_storage().nbytes() for one in tensors}.values())
