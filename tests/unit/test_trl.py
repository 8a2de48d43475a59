"""TRL's trainers under `exact`: small micro-batches against the same trainer with one big batch."""

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from harness.trainers import HEADS, SMALL, apart, arguments, make
from harness.trls import ROUNDING, float32_model, grpo, reference_model, reward_model, run_trainer, texts, tokenizer
from macrobatch import by_tokens, verify
from macrobatch.errors import UsageError
from macrobatch.transformers import exact

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and datasets, about themselves

WAYS = {"batches": {}, "three": {"micro": 3}, "tokens": {"micro": by_tokens(48)}}


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    datasets.disable_progress_bars()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft(way, loss_type):
    data = texts(("prompt", 2, 6), ("completion", 1, 15), count=22)
    options = {"max_length": 40, "loss_type": loss_type}
    big, losses = run_trainer(trl.SFTTrainer, trl.SFTConfig, data, big=True, options=options)
    made, ours = run_trainer(exact(trl.SFTTrainer, **WAYS[way]), trl.SFTConfig, data, options=options)
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
    big, _ = run_trainer(trl.SFTTrainer, trl.SFTConfig, data, big=True, options=options)
    made, _ = run_trainer(exact(trl.SFTTrainer), trl.SFTConfig, data, options=options)
    assert apart(made, big.model.state_dict()) <= ROUNDING


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "sigmoid_norm"])
def test_dpo(way, loss_type):
    data = texts(("prompt", 2, 6), ("chosen", 1, 15), ("rejected", 1, 9), count=22)
    options = {"max_length": 40, "loss_type": [loss_type]}
    big, losses = run_trainer(
        trl.DPOTrainer, trl.DPOConfig, data, big=True, options=options, ref_model=reference_model()
    )
    made, ours = run_trainer(
        exact(trl.DPOTrainer, **WAYS[way]), trl.DPOConfig, data, options=options, ref_model=reference_model()
    )
    assert ours == pytest.approx(losses, abs=2e-6)
    assert apart(made, big.model.state_dict()) <= (10 if loss_type == "ipo" else 1) * ROUNDING  # its loss is 25


@pytest.mark.parametrize("way", WAYS)
def test_dpo_with_two_terms(way):
    """A mean over pairs and one over tokens: small batches of the trainer as it is give another gradient."""
    data = texts(("prompt", 2, 6), ("chosen", 1, 15), ("rejected", 1, 9), count=22)
    options = {"max_length": 40, "loss_type": ["sigmoid", "sft"], "loss_weights": [0.7, 1.5]}
    big, losses = run_trainer(
        trl.DPOTrainer, trl.DPOConfig, data, big=True, options=options, ref_model=reference_model()
    )
    theirs, _ = run_trainer(trl.DPOTrainer, trl.DPOConfig, data, options=options, ref_model=reference_model())
    made, ours = run_trainer(
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


PAIRS = (("prompt", 2, 6), ("chosen", 1, 15), ("rejected", 1, 9))
TRIPLES = (*PAIRS, ("reference", 1, 12))


def answers():
    """Completions that are good or bad."""
    found = texts(("prompt", 2, 6), ("completion", 1, 15), count=22)
    return found.add_column("label", [bool(index % 3) for index in range(22)])


REFUSED = {
    "aot": ("DPO", {"loss_type": ["aot"]}, "compares all pairs of a batch"),
    "weighted sft": ("DPO", {"loss_type": ["sigmoid", "sft"], "use_weighting": True}, "a mean over tokens, beside"),
    "kto": ("KTO", {}, "compares the samples of a batch"),
    "orpo": ("ORPO", {}, "a mean over tokens to a mean over pairs"),
    "cpo": ("CPO", {}, "a mean over tokens to a mean over pairs"),
    "tpo": ("TPO", {}, "a mean over tokens to a mean over triples"),
}
EXACT = {
    "dpo sft": ("DPO", {"loss_type": ["sft"]}),
    "kto apo": ("KTO", {"loss_type": "apo_zero_unpaired"}),
    "simpo": ("CPO", {"cpo_alpha": 0.0, "loss_type": "simpo"}),
    "tpo alone": ("TPO", {"tpo_alpha": 0.0}),
}


def case(name):
    """The class, its arguments' class, data, and what else it takes."""
    from trl.experimental import cpo, orpo, tpo

    room = {"CPO": cpo, "ORPO": orpo, "TPO": tpo}.get(name, trl)
    data = answers() if name == "KTO" else texts(*(TRIPLES if name == "TPO" else PAIRS), count=22)
    given = {"ref_model": reference_model()} if room is trl else {}
    return getattr(room, f"{name}Trainer"), getattr(room, f"{name}Config"), data, given


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_when_it_is_made(name):
    kind, options, reason = REFUSED[name]
    trainer_class, config, data, given = case(kind)
    with pytest.raises(UsageError, match=f"cannot be exact: .*{reason}.* .gradient_accumulation_steps=1"):
        exact(trainer_class)(
            model=make("llama"),
            args=arguments(kind=config, bf16=False, **options),
            train_dataset=data,
            processing_class=tokenizer(),
            **given,
        )


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", [name for name in REFUSED if name != "weighted sft"])  # TRL's own fails in that one
def test_one_batch_a_step_is_the_trainer_as_it_is(name, bf16):
    kind, options, _ = REFUSED[name]
    found = []
    for make_class in (lambda trainer_class: trainer_class, exact):
        trainer_class, config, data, given = case(kind)  # with a reference model of its own, which TRL changes
        more = {"steps": 1, "per_device": 4, "options": {**options, "bf16": bf16, "max_steps": 2}, **given}
        made, losses = run_trainer(make_class(trainer_class), config, data, **more)
        found.append((losses, made.model.state_dict()))
    assert found[0][0] == found[1][0]
    assert apart(found[1][1], found[0][1]) == 0


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_other_preferences(name, bf16):
    kind, options = EXACT[name]
    trainer_class, config, data, given = case(kind)
    big, losses = run_trainer(trainer_class, config, data, big=True, options=options, **given)
    given = case(kind)[-1]
    made, ours = run_trainer(exact(trainer_class), config, data, options={**options, "bf16": bf16}, **given)
    assert ours == pytest.approx(losses, abs=5e-3 if bf16 else 2e-6)
    assert apart(made, big.model.state_dict()) <= (3e-4 if bf16 else ROUNDING)


def test_metrics_are_those_of_the_batches_alone():
    logged = []
    trainer_class, config, data, _ = case("CPO")
    for kind in (trainer_class, exact(trainer_class)):
        made, _ = run_trainer(kind, config, data, options={"cpo_alpha": 0.0, "loss_type": "simpo"})
        logged.append([entry["rewards/chosen"] for entry in made.state.log_history if "rewards/chosen" in entry])
    assert logged[1] == pytest.approx(logged[0], abs=1e-6)


# ---------------------------------------------------------------------------------------------- mixtures of experts


def experts(kind):
    sizes = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5, "head_dim": 8}
    torch.manual_seed(1)
    if kind == "gpt-oss":
        model = GptOssForCausalLM(GptOssConfig(**SMALL, **HEADS, **sizes, num_local_experts=4))
    else:
        config = Qwen3MoeConfig(**SMALL, **HEADS, **sizes, num_experts=4, moe_intermediate_size=12)
        model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("eager")  # the other one has no float64
    return model.double()


@pytest.mark.parametrize("way", ["batches", "three"])
@pytest.mark.parametrize("name", ["SFT", "DPO"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss"])
def test_balance_losses(kind, name, way):
    data = texts(*(PAIRS if name == "DPO" else (("prompt", 2, 6), ("completion", 1, 15))), count=16)
    trainer_class, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    given = {"options": {"max_length": 40, "router_aux_loss_coef": 0.5}, "model": lambda: experts(kind)}
    if name == "DPO":
        given["ref_model"] = experts(kind).requires_grad_(False)
    big, losses = run_trainer(trainer_class, config, data, big=True, **given)
    theirs, _ = run_trainer(trainer_class, config, data, **given)
    made, ours = run_trainer(exact(trainer_class, **WAYS[way]), config, data, **given)
    assert ours == pytest.approx(losses, abs=5e-6)
    assert apart(made, big.model.state_dict()) <= 2 * ROUNDING
    assert apart(theirs, big.model.state_dict()) > 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_reward(way):
    data = texts(("chosen", 1, 15), ("rejected", 1, 9), count=22)
    options = {"max_length": 40, "center_rewards_coefficient": 0.1}
    big, losses = run_trainer(trl.RewardTrainer, trl.RewardConfig, data, big=True, model=reward_model, options=options)
    made, ours = run_trainer(
        exact(trl.RewardTrainer, **WAYS[way]), trl.RewardConfig, data, model=reward_model, options=options
    )
    assert ours == pytest.approx(losses, abs=2e-6)
    assert apart(made, big.model.state_dict()) <= ROUNDING


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_grpo(loss_type):
    big, losses = grpo(trl.GRPOTrainer, loss_type, big=True)
    made, ours = grpo(exact(trl.GRPOTrainer), loss_type)
    assert ours == pytest.approx(losses, abs=2e-6)
    assert apart(made, big.model.state_dict()) <= ROUNDING
    assert max(parameter.grad is None for parameter in made.model.parameters())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo", ""], ids=str)
def test_grpo_and_rloo_are_bit_for_bit_the_trainer_as_it_is(loss_type, bf16):
    """Where that is right: all batches have as many completions."""
    trainer_class = trl.GRPOTrainer if loss_type else trl.RLOOTrainer
    theirs, losses = grpo(trainer_class, loss_type, model=float32_model, bf16=bf16)
    ours, our_losses = grpo(exact(trainer_class), loss_type, model=float32_model, bf16=bf16)
    assert ours.state.global_step == 2
    assert our_losses == pytest.approx(losses, abs=1e-7)  # logged; the loop adds them up differently
    assert apart(ours, theirs.model.state_dict()) == 0
    assert apart(ours, float32_model().state_dict()) > 1e-4  # it has learnt


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_distillation_divides_once_and_generates_as_often(steps):
    data, found = texts(("prompt", 2, 6), count=16), []
    for kind in (trl.DistillationTrainer, exact(trl.DistillationTrainer)):

        class Counts(kind):
            generated = 0

            def _generate_and_score_completions(self, *given, **named):
                self.generated += 1
                return super()._generate_and_score_completions(*given, **named)

        torch.manual_seed(5)
        more = {"options": {"max_completion_length": 8}, "teacher_model": reference_model(), "per_device": 4}
        made, losses = run_trainer(
            Counts, trl.DistillationConfig, data, steps=steps, model=lambda: make("llama"), **more
        )
        found.append((losses, made.generated, made.model.state_dict()))
    (losses, generated, weights), (ours, our_generated, our_weights) = found
    assert ours == pytest.approx(losses, abs=1e-6)
    assert our_generated == generated == 4 // steps
    assert apart(our_weights, weights) == 0


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
