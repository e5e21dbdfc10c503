"""`load_from_checkpoint` of Lightning for a LightningModule whose net is sketched."""

import pytest
import torch
from torch import nn

import panther_compile as pc

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.integrations


def net():
    return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48), nn.Linear(48, 5))


class Classifier(lightning.LightningModule):
    """As docs/integrations.md has it: the net is an argument, and no hyper-parameter."""

    def __init__(self, net, rate=1e-2):
        super().__init__()
        self.save_hyperparameters(ignore="net")
        self.net = net

    def training_step(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=self.hparams.rate)


@pytest.fixture
def trained(tmp_path):
    """A sketched model after a few steps, its checkpoint, and the folder of what was sketched."""
    torch.manual_seed(0)
    small = pc.sketchify(net(), 0.5, progress=False, min_params=0, allow_slower=True)
    pc.save_sketched(small, tmp_path / "small")
    data = torch.utils.data.TensorDataset(torch.randn(32, 48), torch.randint(0, 5, (32,)))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    module = Classifier(small, rate=0.05)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    return module, tmp_path


def test_it_is_loaded_into_the_sketch(trained):
    module, folder = trained
    again = Classifier.load_from_checkpoint(
        folder / "last.ckpt", net=pc.load_sketched(net(), folder / "small")
    )
    assert again.hparams.rate == 0.05
    start = pc.load_sketched(net(), folder / "small").state_dict()
    for name, value in module.net.state_dict().items():
        assert torch.equal(again.net.state_dict()[name], value)
    assert not torch.equal(start["0.down.weight"], module.net.state_dict()["0.down.weight"])


def test_a_dense_net_is_refused_by_name(trained):
    _, folder = trained
    with pytest.raises(RuntimeError, match=r"net\.0\.down\.weight"):
        Classifier.load_from_checkpoint(folder / "last.ckpt", net=net())
