"""Whether a subclass of an embedding reads its weight as torch's embedding alone does.

    return super().forward(ids) * self.embed_scale
    return super().forward(positions + self.offset)

So do the tables of Gemma and of BART's family, which scale what they read. The forward is read as a graph.
"""

import torch.nn.functional as F
from torch import fx, nn

from panther_compile.kinds.match import read_forward_of_both_modes


def reads_rows(module: nn.Module) -> bool:
    """Whether the own forward of a subclass of `nn.Embedding` looks its weight up, and asks its type at most.

    Args:
        module: any.
    """
    cls = type(module)
    if not isinstance(module, nn.Embedding) or cls.forward is nn.Embedding.forward:
        return False
    weight = module._parameters.get("weight")
    sizes = (module.num_embeddings, module.embedding_dim)
    if weight is None or tuple(weight.shape) != sizes or module.max_norm is not None:
        return False
    graph = read_forward_of_both_modes(module)
    reads = [] if graph is None else graph.find_nodes(op="get_attr", target="weight")
    users = [(read, user) for read in reads for user in read.users]
    looked_up = sum(_looks_up(user, read) for read, user in users)
    return looked_up > 0 and all(_looks_up(user, read) or _asks(user) for read, user in users)


def _looks_up(node: fx.Node, table: fx.Node) -> bool:
    return node.target is F.embedding and len(node.args) > 1 and node.args[1] is table is not node.args[0]


def _asks(node: fx.Node) -> bool:
    return node.target is getattr and node.args[1] in ("dtype", "device")
