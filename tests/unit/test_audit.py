"""`macrobatch.audit` on programs with a known answer."""

import contextlib
import gc
import weakref

import pytest
import torch

import macrobatch
from harness import (
    audited,
    audited_library,
    audited_losses,
    audited_odd,
    audited_right,
    audited_scales,
    audited_unknown,
    audited_wrong,
)
from harness.audited import PROGRAMS

KINDS = (
    audited_right,
    audited_library,
    audited_odd,
    audited_losses,
    audited_scales,
    audited_wrong,
    audited_unknown,
)  # they fill the catalogue


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("name", PROGRAMS)
def test_known_programs(name):
    answer = PROGRAMS[name]
    torch.manual_seed(0)
    with macrobatch.audit() as report:
        answer.run()
    assert (report.verdict, set(report.causes)) == (answer.verdict, set(answer.causes)), report
    if answer.factor is not None:
        assert report.factor == pytest.approx(answer.factor, rel=1e-3)


def weights_of(run):
    torch.manual_seed(0)
    model = run()
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def dropout_and_clipping():
    model = torch.nn.Sequential(audited.network(), torch.nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for window in audited.windows(audited.UNEQUAL, 4):
        for x, y in window:
            (torch.nn.functional.cross_entropy(model(x), y) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        audited.step(optimizer)
    return model


def test_the_weights_are_those_without_audit():
    plain = weights_of(dropout_and_clipping)
    with macrobatch.audit() as report:
        assert weights_of(dropout_and_clipping) == plain
    assert report.causes == ["mean of means"]


def test_everything_is_put_back():
    owners = (torch.autograd, torch.nn.utils, torch.nn.functional, torch.amp.GradScaler)
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(ZeroDivisionError), macrobatch.audit() as report:
        assert vars(torch.autograd) != before[0]
        PROGRAMS["equal_micro_batches"].run()
        raise ZeroDivisionError
    assert [dict(vars(owner)) for owner in owners] == before
    assert report.verdict == "unknown"
    assert len(report.windows) == 2
    PROGRAMS["equal_micro_batches"].run()
    assert len(report.windows) == 2, "it still watches"


def test_nothing_of_the_program_is_kept_alive():
    """And no more is kept after 300 windows than after 30, except for the numbers of the report."""
    with macrobatch.audit():
        model = audited.network()
        kept = [weakref.ref(p) for p in model.parameters()]
        optimizer = audited.sgd(model)
        counts = []
        for number in range(300):
            x, y = next(audited.batches([4]))
            loss = audited.cross_entropy(model, x, y)
            kept.append(weakref.ref(loss))
            loss.backward()
            audited.step(optimizer)
            if number in (30, 299):
                del loss
                gc.collect()
                counts.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
        del model, optimizer
        gc.collect()
        assert [reference() for reference in kept] == [None] * len(kept)
    assert counts[1] <= counts[0] + 2


def test_a_report_can_be_read_while_the_program_runs():
    with macrobatch.audit() as report:
        assert report.verdict == "unknown"
        PROGRAMS["equal_micro_batches"].run()
        assert report.verdict == "exact"
        PROGRAMS["mean_of_means"].run()
        assert report.verdict == "wrong"
    assert "mean of means" in str(report)
    assert "<svg" in report.to_html()
    assert report.windows[0].items == report.windows[0]["items"] == [4] * 4


def test_each_optimizer_has_all_its_windows():
    for name, optimizers in (("two_optimizers_for_one_model", ["SGD", "Adam"] * 2), ("a_gan", ["Adam", "Adam 2"] * 8)):
        with macrobatch.audit() as report:
            PROGRAMS[name].run()
        assert [window.optimizer for window in report.windows] == optimizers
        assert all(None not in window.weights for window in report.windows)


def test_backwards_that_reach_no_step_are_left_out_when_the_program_has_ended():
    with macrobatch.audit() as report:
        model = audited.network()
        optimizer = audited.sgd(model)
        for index, (x, y) in enumerate(audited.batches([4] * 7)):
            (audited.cross_entropy(model, x, y) / 4).backward()
            if index == 3:
                audited.step(optimizer)
        assert report.verdict == "exact"  # a step may follow
    assert report.causes == ["samples left out"]
    assert "3 backwards after window 1 of SGD, the last one, reached no step" in str(report)


@pytest.mark.parametrize(
    ("factor", "cause", "evidence"),
    [
        (2.0, "not divided", "sums over 9 items are added up, and divided by nothing"),
        (1 / 8, "items that do not fit the loss", "a sum over 9 items was divided by 8."),
    ],
)
def test_what_a_sum_was_divided_by(factor, cause, evidence):
    def by_hand(model, _):
        for parameter in model.parameters():
            parameter.grad *= factor

    with macrobatch.audit() as report:
        loss = torch.nn.CrossEntropyLoss(reduction="sum")
        audited.simple([4, 3, 2], 3, lambda model, x, y: loss(model(x), y), before=by_hand)
    assert report.causes == [cause]
    assert evidence in str(report)


def test_no_cure_by_the_library_for_a_constant_factor():
    with macrobatch.audit() as report:
        PROGRAMS["weighed_by_more_items_than_there_are"].run()
    assert "by hand:" in str(report)
    assert "with macrobatch:" not in str(report)
    assert "Accumulator" not in report.to_html()


def test_a_model_inside_of_reentrant_checkpointing():
    with macrobatch.audit() as report:
        PROGRAMS["a_model_inside_of_reentrant_checkpointing"].run()
    assert len(report.windows) == 2
    assert "no backward was seen to add" in str(report)
    assert "use_reentrant=False" in str(report)


def test_audits_inside_of_each_other():
    with macrobatch.audit() as outer, macrobatch.audit() as inner:
        PROGRAMS["equal_micro_batches"].run()
        with macrobatch.audit() as last:
            PROGRAMS["mean_of_means"].run()
    assert [outer.causes, inner.causes, last.causes] == [["mean of means"]] * 3
    assert len(outer.windows) == len(inner.windows) == len(last.windows) + 2


def test_a_failed_backward_that_added_nothing_does_not_count():
    with macrobatch.audit() as report:
        model = audited.network()
        optimizer = audited.sgd(model)
        for index, (x, y) in enumerate(audited.batches([4] * 4)):
            loss = audited.cross_entropy(model, x, y) / 2
            if index == 0:
                loss.backward()
                with contextlib.suppress(RuntimeError):
                    loss.backward()  # its graph is freed
            else:
                loss.backward()
            if index % 2:
                audited.step(optimizer)
    assert report.verdict == "exact", report


@pytest.mark.parametrize(
    ("where", "planted", "program"),
    [
        ("macrobatch.auditing.explaining.ratio_of", lambda *_: 1.0, "loss_and_gradients_divided"),
        ("macrobatch.auditing.ledger.same", lambda *_: True, "cleared_in_every_micro_batch"),
        ("macrobatch.auditing.reading.terms_of", lambda *_: ((), None), "mean_of_means"),
        ("macrobatch.auditing.ledger.Ledger._find_mixed", lambda _: None, "the_gradient_of_a_generator_in_the_judge"),
        ("macrobatch.auditing.ledger._Reading._is_scaled", lambda _: False, "clipped_while_it_was_scaled"),
        ("macrobatch.auditing.grouping._targets", lambda _: lambda _: "", "a_gan_with_noisy_labels"),
        ("macrobatch.auditing.grouping._compare_with_constants", lambda *_: True, "two_batches_in_two_lines"),
        ("macrobatch.auditing.grouping._may_be_routed", lambda _: False, "an_expert_for_each_micro_batch"),
        ("macrobatch.auditing.constants._has_once", lambda *_: False, "a_weight_and_a_share_are_multiplied"),
        ("macrobatch.auditing.ledger.Ledger.note_scheduler", lambda _: None, "scheduler_in_every_micro_batch"),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_a_planted_bug_is_seen(monkeypatch, where, planted, program):
    monkeypatch.setattr(where, planted)
    with pytest.raises(AssertionError):
        test_known_programs(program)
