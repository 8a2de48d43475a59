"""`macrobatch.audit` on the trainers of other libraries, as they are."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import macrobatch
from harness.audited import UNEQUAL, batches, network, step

pytestmark = pytest.mark.filterwarnings("ignore")  # of these libraries, about themselves


def loader():
    return DataLoader(list(batches([*UNEQUAL, 3, 3])), batch_size=1, collate_fn=lambda batch: batch[0])


def weights_by_window(report):
    return [window.scale for window in report.windows]


@pytest.mark.parametrize(
    ("kind", "verdict", "factor"), [("llama", "exact", 1.0), ("gpt2", "wrong", None), ("bert", "wrong", 4.0)]
)
def test_transformers(kind, verdict, factor):
    """GPT-2 counts its labels before the shift; BERT takes the number of items, but does not use it."""
    transformers = pytest.importorskip("transformers")
    from harness import trainers

    data = trainers.samples(kind, 16)
    if factor is None:
        learnt = [(sample["labels"] != -100) for sample in data]
        factor = min(sum(int(m[1:].sum()) for m in w) / sum(int(m.sum()) for m in w) for w in (learnt[:8], learnt[8:]))
    made = trainers.trainer(kind, transformers.Trainer, data)
    with macrobatch.audit() as report:
        trainers.train(made)
    assert report.verdict == verdict, report
    assert report.factor == pytest.approx(factor, rel=1e-3)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    with macrobatch.audit() as report:
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert report.causes == ["mean of means", "short window"], report
    assert weights_by_window(report) == pytest.approx([1, 1, 0.5])
    assert "test_audit_trainers.py" in report.judgement.places[0]


def test_lightning():
    pl = pytest.importorskip("lightning.pytorch")
    from harness.lightnings import OURS

    class Task(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, _):
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = pl.Trainer(max_epochs=1, accumulate_grad_batches=4, gradient_clip_val=0.01, **OURS)
    with macrobatch.audit() as report:
        trainer.fit(Task(), loader())
    assert report.causes == ["mean of means", "short window"], report
    assert weights_by_window(report) == pytest.approx([1, 1, 0.5])


def test_fabric():
    fabric_module = pytest.importorskip("lightning.fabric")
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    with macrobatch.audit() as report:
        for x, y in batches([4] * 4):
            fabric.backward(F.cross_entropy(model(x), y) / 4)
        step(optimizer)
    assert report.verdict == "exact", report
