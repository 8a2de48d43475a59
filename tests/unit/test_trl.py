"""TRL's trainers under `exact`: small micro-batches against the same trainer with one big batch."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from harness.trainers import HEADS, SMALL, WORDS, apart, arguments, make, train
from macrobatch import by_tokens, verify
from macrobatch.errors import UsageError
from macrobatch.transformers import exact

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and datasets, about themselves

ROUNDING = 3e-8  # their losses are computed in float32
WAYS = {"batches": {}, "three": {"micro": 3}, "tokens": {"micro": by_tokens(48)}}


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    datasets.disable_progress_bars()


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["<pad>", "<eos>", "<unk>"] + [f"w{index}" for index in range(WORDS - 3)]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(*columns, count):
    """Each column has a name and its shortest and longest text, in words."""
    draw = torch.Generator().manual_seed(3)

    def text(low, high):
        length = int(torch.randint(low, high, (1,), generator=draw))
        return " ".join(f"w{int(word)}" for word in torch.randint(0, WORDS - 3, (length,), generator=draw))

    rows = [{name: text(low, high) for name, low, high in columns} for _ in range(count)]
    return datasets.Dataset.from_list(rows)


def run(trainer_class, config, data, *, big=False, model=None, steps=4, per_device=2, options=None, **given):
    """Train; `big`: with all samples of a window in one batch."""
    sizes = {"steps": 1, "per_device": steps * per_device} if big else {"steps": steps, "per_device": per_device}
    more = {"bf16": False, "gradient_checkpointing": False, **(options or {})}
    made = trainer_class(
        model=make("llama") if model is None else model(),
        args=arguments(kind=config, **sizes, **more),
        train_dataset=data,
        processing_class=tokenizer(),
        **given,
    )
    return made, train(made)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft(way, loss_type):
    data = texts(("prompt", 2, 6), ("completion", 1, 15), count=22)
    options = {"max_length": 40, "loss_type": loss_type}
    big, losses = run(trl.SFTTrainer, trl.SFTConfig, data, big=True, options=options)
    made, ours = run(exact(trl.SFTTrainer, **WAYS[way]), trl.SFTConfig, data, options=options)
    assert ours == pytest.approx(losses, abs=2e-6)
    assert apart(made, big.model.state_dict()) <= ROUNDING
    theirs, entries = big.state.log_history, made.state.log_history
    assert [entry["num_tokens"] for entry in entries[:3]] == [entry["num_tokens"] for entry in theirs[:3]]
    if way != "batches":  # means over the window, as those of one big batch
        for name in ("entropy", "mean_token_accuracy"):
            assert [e[name] for e in entries[:3]] == pytest.approx([e[name] for e in theirs[:3]], abs=1e-6)


@pytest.mark.parametrize(
    "how",
    [
        {"packing": True, "packing_strategy": "wrapped", "padding_free": False},
        {"packing": True, "packing_strategy": "bfd"},
        {"padding_free": True, "max_length": None},
    ],
    ids=["wrapped", "best fit", "padding-free"],
)
def test_sft_packed(how):
    """Rows of several texts: nothing is cut, and labels are counted as they are."""
    data = texts(("text", 3, 15), count=40)
    options = {"max_length": 24} | how
    big, _ = run(trl.SFTTrainer, trl.SFTConfig, data, big=True, options=options)
    made, _ = run(exact(trl.SFTTrainer), trl.SFTConfig, data, options=options)
    assert apart(made, big.model.state_dict()) <= ROUNDING


def reference_model():
    model = make("llama")
    for parameter in model.parameters():
        parameter.data += 0.02
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "sigmoid_norm"])
def test_dpo(way, loss_type):
    data = texts(("prompt", 2, 6), ("chosen", 1, 15), ("rejected", 1, 9), count=22)
    options = {"max_length": 40, "loss_type": [loss_type]}
    big, losses = run(trl.DPOTrainer, trl.DPOConfig, data, big=True, options=options, ref_model=reference_model())
    made, ours = run(
        exact(trl.DPOTrainer, **WAYS[way]), trl.DPOConfig, data, options=options, ref_model=reference_model()
    )
    assert ours == pytest.approx(losses, abs=2e-6)
    assert apart(made, big.model.state_dict()) <= (10 if loss_type == "ipo" else 1) * ROUNDING  # its loss is 25


@pytest.mark.parametrize("way", WAYS)
def test_dpo_with_two_terms(way):
    """A mean over pairs and one over tokens: small batches of the trainer as it is give another gradient."""
    data = texts(("prompt", 2, 6), ("chosen", 1, 15), ("rejected", 1, 9), count=22)
    options = {"max_length": 40, "loss_type": ["sigmoid", "sft"], "loss_weights": [0.7, 1.5]}
    big, losses = run(trl.DPOTrainer, trl.DPOConfig, data, big=True, options=options, ref_model=reference_model())
    theirs, _ = run(trl.DPOTrainer, trl.DPOConfig, data, options=options, ref_model=reference_model())
    made, ours = run(
        exact(trl.DPOTrainer, **WAYS[way]), trl.DPOConfig, data, options=options, ref_model=reference_model()
    )
    assert ours == pytest.approx(losses, abs=5e-6)
    assert apart(made, big.model.state_dict()) <= 3 * ROUNDING
    assert apart(theirs, big.model.state_dict()) > 1e-4


@pytest.mark.parametrize("loss_type", [["sigmoid"], ["sigmoid", "sft"]], ids=["one term", "two terms"])
def test_verify_of_dpo(loss_type):
    """Pairs stay pairs. The batches have different widths."""
    data = texts(("prompt", 2, 6), ("chosen", 1, 15), ("rejected", 1, 9), count=22)

    def made(trainer_class):
        return trainer_class(
            model=make("llama"),
            ref_model=reference_model(),
            args=arguments(kind=trl.DPOConfig, bf16=False, max_length=40, loss_type=loss_type),
            train_dataset=data,
            processing_class=tokenizer(),
        )

    assert verify(made(exact(trl.DPOTrainer))).ok
    assert verify(made(trl.DPOTrainer)).ok is (len(loss_type) == 1)


def test_dpo_with_a_loss_that_compares_all_pairs_is_refused():
    data = texts(("prompt", 2, 6), ("chosen", 1, 15), ("rejected", 1, 9), count=22)
    with pytest.raises(UsageError, match="compares all pairs"):
        run(exact(trl.DPOTrainer), trl.DPOConfig, data, options={"loss_type": ["aot"]}, ref_model=reference_model())


def reward_model():
    torch.manual_seed(1)
    return LlamaForSequenceClassification(LlamaConfig(**SMALL, **HEADS, num_labels=1)).double()


@pytest.mark.parametrize("way", WAYS)
def test_reward(way):
    data = texts(("chosen", 1, 15), ("rejected", 1, 9), count=22)
    options = {"max_length": 40, "center_rewards_coefficient": 0.1}
    big, losses = run(trl.RewardTrainer, trl.RewardConfig, data, big=True, model=reward_model, options=options)
    made, ours = run(exact(trl.RewardTrainer, **WAYS[way]), trl.RewardConfig, data, model=reward_model, options=options)
    assert ours == pytest.approx(losses, abs=2e-6)
    assert apart(made, big.model.state_dict()) <= ROUNDING


def lengths(completions, **_):
    return [float(len(completion) % 5) for completion in completions]


def grpo(trainer_class, loss_type, *, big=False):
    torch.manual_seed(5)
    options = {"max_completion_length": 8, "num_generations": 4, "loss_type": loss_type}
    data = texts(("prompt", 2, 6), count=8)
    sizes = {"big": big, "per_device": 4, "reward_funcs": lengths}
    return run(trainer_class, trl.GRPOConfig, data, options=options, **sizes)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_grpo(loss_type):
    big, losses = grpo(trl.GRPOTrainer, loss_type, big=True)
    made, ours = grpo(exact(trl.GRPOTrainer), loss_type)
    assert ours == pytest.approx(losses, abs=2e-6)
    assert apart(made, big.model.state_dict()) <= ROUNDING
    assert max(parameter.grad is None for parameter in made.model.parameters())


def test_grpo_as_it_is_depends_on_its_batches():
    big, _ = grpo(trl.GRPOTrainer, "bnpo", big=True)
    made, _ = grpo(trl.GRPOTrainer, "bnpo")
    assert apart(made, big.model.state_dict()) > 1e-4


def test_grpo_is_not_cut_anew():
    with pytest.raises(UsageError, match="GRPOTrainer has a training_step of its own"):
        grpo(exact(trl.GRPOTrainer, micro=2), "grpo")


def test_grpo_with_a_loss_of_ones_own_is_refused():
    class Own(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    with pytest.raises(UsageError, match=r"Own\._compute_loss is not TRL's own"):
        grpo(exact(Own), "grpo")
