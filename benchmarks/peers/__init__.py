"""Peers, each written from its paper's equations, for the same layers and the same count of numbers."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from peers import (
    aa_svd,
    asvd,
    basis_sharing,
    corp,
    fwsvd,
    int8,
    int_weights,
    kfac_svd,
    mpifa,
    panther_copy,
    rocket,
    sola,
    svd,
    svd_llm,
    svd_llm_v2,
    swift_svd,
    two_four,
    zs_svd,
)
from peers.job import Job
from peers.nested import nested


@dataclass(frozen=True)
class Peer:
    """A method.

    Attributes:
        title: for the report.
        compress: (job, ratio) to a compressed copy of the model.
        calibrated: whether it looks at data.
        counted: whether what it stores is the same number of numbers as the others'.
    """

    title: str
    compress: Callable[[Job, float], nn.Module]
    calibrated: bool
    counted: bool = True


PEERS = {
    "panther": Peer("Panther's copy", panther_copy.compress, calibrated=False),
    "svd": Peer("truncated SVD", nested("svd", svd.decompose), calibrated=False),
    "2:4": Peer("2:4 by magnitude (.53 stored)", two_four.compress, calibrated=False, counted=False),
    "int8": Peer("dynamic int8 (.25 of the bytes)", int8.compress, calibrated=False, counted=False),
    "int8-weights": Peer(
        "int8 weights by torchao (.25 of the bytes)", int_weights.compress, calibrated=False, counted=False
    ),
    "int4-weights": Peer(
        "int4 weights by torchao, a scale for 32 (.16 of the bytes)",
        int_weights.compress_to_int4,
        calibrated=False,
        counted=False,
    ),
    "fwsvd": Peer("FWSVD", nested("fwsvd", fwsvd.decompose), calibrated=True),
    "asvd": Peer("ASVD", nested("asvd", asvd.decompose), calibrated=True),
    "svd-llm": Peer("SVD-LLM (W)", nested("svd-llm", svd_llm.decompose), calibrated=True),
    "svd-llm-v2": Peer("SVD-LLM v2", svd_llm_v2.compress, calibrated=True),
    "swift": Peer("Swift-SVD", nested("swift", swift_svd.decompose), calibrated=True),
    "aa-svd": Peer("AA-SVD, objective 4", aa_svd.compress, calibrated=True),
    "aa-svd-refined": Peer("AA-SVD, refined", aa_svd.compress_and_refine, calibrated=True),
    "kfac-svd": Peer("KFAC-SVD", kfac_svd.uniform, calibrated=True),
    "kfac-svd-lems": Peer("KFAC-SVD with LEMS", kfac_svd.compress, calibrated=True),
    "zs-svd": Peer("ZS-SVD", zs_svd.compress, calibrated=True),
    "mpifa": Peer("MPIFA", mpifa.compress, calibrated=True),
    "basis-sharing": Peer("Basis Sharing", basis_sharing.compress, calibrated=True),
    "sola": Peer("SoLA", sola.compress, calibrated=True),
    "rocket": Peer("ROCKET", rocket.compress, calibrated=True),
    "corp": Peer("CORP", corp.compress, calibrated=True),
}
