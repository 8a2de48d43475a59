"""The models of transformers that compute a loss, each made tiny, and whether micro-batches give its gradient."""

import inspect
import warnings
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

from harness.reference import gradients_of, relative_error
from macrobatch import MacroStep
from macrobatch.errors import MacrobatchError

TASKS = {
    "CAUSAL_LM": "causal",
    "MASKED_LM": "masked",
    "SEQ_TO_SEQ_CAUSAL_LM": "sequence to sequence",
    "SEQUENCE_CLASSIFICATION": "samples",
    "TOKEN_CLASSIFICATION": "tokens",
    "QUESTION_ANSWERING": "spans",
    "MULTIPLE_CHOICE": "choices",
    "NEXT_SENTENCE_PREDICTION": "pairs",
    "IMAGE_CLASSIFICATION": "images",
    "SEMANTIC_SEGMENTATION": "pixels",
    "MASKED_IMAGE_MODELING": "patches",
}
SAMPLES, LENGTH, VOCABULARY, CLASSES, PIXELS, PATCH = 5, 7, 32, 4, 32, 8
LEARNT = (7, 3, 5, 2, 6)  # labels of each sample
MOST_PARAMETERS = 8_000_000
EXACT = 1e-12


# ---------------------------------------------------------------------------------------------------- which there are


class Model(NamedTuple):
    """A class of transformers, and the kind of its labels."""

    name: str
    task: str


def models() -> Iterator[Model]:
    """Every model that transformers lists for a task, once for each of its tasks."""
    seen = set()
    for list_of, task in TASKS.items():
        for names in getattr(modeling_auto, f"MODEL_FOR_{list_of}_MAPPING_NAMES").values():
            for name in [names] if isinstance(names, str) else names:
                if (model := Model(name, task)) not in seen:
                    seen.add(model)
                    yield model


# ------------------------------------------------------------------------------------------------------------ tiny ones

_SIZES: dict[str, int] = {
    name: size
    for size, names in (
        (VOCABULARY, "vocab_size text_vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size"),
        (16, "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim attention_hidden_size "
             "encoder_hidden_size decoder_hidden_size word_embed_proj_dim d_embed projection_dim hidden_dim model_dim"),
        (32, "intermediate_size ffn_dim d_ff d_inner encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size "
             "moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp ffn_intermediate_size "
             "mlp_hidden_size ffn_hidden_dim dense_intermediate_size expert_ffn_size"),
        (2, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
            "num_key_value_heads linear_num_key_heads linear_num_value_heads num_kv_heads n_kv_heads mamba_n_heads "
            "num_encoder_attention_heads num_decoder_attention_heads index_n_heads"),
        (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
            "num_encoder_layers layers num_hidden_groups"),
        (8, "head_dim d_kv attention_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim linear_key_head_dim "
            "linear_value_head_dim kv_channels d_head attention_head_size qk_head_dim q_lora_rank kv_lora_rank "
            "o_lora_rank index_head_dim lora_rank"),
        (2, "num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_tok num_experts_per_token "
            "moe_k moe_topk top_k_experts n_shared_experts num_selected_experts"),
        (1, "n_group topk_group num_expert_group"),
        (64, "max_position_embeddings n_positions max_seq_len n_ctx max_source_positions max_target_positions "
             "max_seq_length sliding_window seq_length max_sequence_length"),
        (0, "pad_token_id padding_idx"),
        (1, "bos_token_id"),
        (2, "eos_token_id decoder_start_token_id"),
        (PIXELS, "image_size"),
        (PATCH, "patch_size encoder_stride"),
    )
    for name in names.split()
}  # fmt: skip


def _shrink(config: PretrainedConfig, depth: int = 0) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            if depth < 4:
                _shrink(value, depth + 1)
        elif name in _SIZES and (type(value) is int or (value is None and name.endswith("token_id"))):
            setattr(config, name, _SIZES[name])
    if not hasattr(config, "decoder_start_token_id") and getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 2
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list):  # one of each kind, in turns
        number = getattr(config, "num_hidden_layers", 2)
        config.layer_types = (list(dict.fromkeys(kinds)) * number)[:number]


class NotRunError(Exception):
    """A model that cannot be made tiny by its configuration alone, or wants inputs of its own."""


def tiny(name: str, task: str) -> nn.Module:
    """The model in float64 and evaluation mode, with random weights."""
    kind: Any = getattr(transformers, name)
    config = kind.config_class(num_labels=2 if task in ("spans", "pairs") else CLASSES)
    _shrink(config)
    config._experts_implementation = "eager"  # grouped products have no float64
    with torch.device("meta"):
        sizes = [p.numel() for p in kind(config).parameters()]
    if sum(sizes) > MOST_PARAMETERS:
        raise NotRunError(f"{sum(sizes):,} parameters")
    if not all(sizes):
        raise NotRunError("it has parameters without elements")
    torch.manual_seed(0)
    model: nn.Module = kind(config).double().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # zeros at the beginning would hide what is wrong
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batch_for(model: nn.Module, task: str) -> dict[str, Tensor]:
    """Samples of which some have more labels than others."""
    draw = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(3, VOCABULARY, shape, generator=draw)

    learnt = torch.arange(LENGTH) < torch.tensor(LEARNT)[:, None]
    if task in ("images", "pixels", "patches"):
        channels = getattr(model.config, "num_channels", 3)
        batch = {"pixel_values": torch.randn(SAMPLES, channels, PIXELS, PIXELS, generator=draw).double()}
        if task == "images":
            return batch | {"labels": torch.randint(0, CLASSES, (SAMPLES,), generator=draw)}
        if task == "pixels":
            labels = torch.randint(0, CLASSES, (SAMPLES, PIXELS, PIXELS), generator=draw)
            ignored = torch.arange(PIXELS)[None, :, None] >= 4 * torch.tensor(LEARNT)[:, None, None]
            return batch | {"labels": labels.masked_fill(ignored, 255)}
        patches = (PIXELS // PATCH) ** 2
        return batch | {
            "bool_masked_pos": torch.arange(patches).expand(SAMPLES, -1) < 2 * torch.tensor(LEARNT)[:, None]
        }
    if task == "choices":
        return {"input_ids": tokens(SAMPLES, 3, LENGTH), "labels": torch.randint(0, 3, (SAMPLES,), generator=draw)}
    batch = {"input_ids": tokens(SAMPLES, LENGTH), "attention_mask": torch.ones(SAMPLES, LENGTH, dtype=torch.long)}
    batch["input_ids"][:, -1] = 2  # the end, for which some look
    if task == "spans":
        start = torch.tensor([0, 3, 1, 2, 5])
        return batch | {"start_positions": start, "end_positions": start + 1}
    if task == "samples":
        return batch | {"labels": torch.randint(0, CLASSES, (SAMPLES,), generator=draw)}
    if task == "pairs":
        return batch | {"labels": torch.randint(0, 2, (SAMPLES,), generator=draw)}
    classes = CLASSES if task == "tokens" else VOCABULARY
    labels = torch.randint(3 if task != "tokens" else 0, classes, (SAMPLES, LENGTH), generator=draw)
    return batch | {"labels": labels.masked_fill(~learnt, -100)}


# -------------------------------------------------------------------------------------------------- what comes of them

Verdict = Literal["exact", "refused", "unknown", "wrong"]


class InFloat64(TorchFunctionMode):
    """Many models compute in float32 in places, whatever their weights are. Here they do so in float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        kwargs = {k: torch.float64 if one is torch.float32 else one for k, one in (kwargs or {}).items()}
        return function(*args, **kwargs)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that the model computes itself."""
    with InFloat64():
        loss: Tensor = model(**batch).loss
    return loss


class Judged(NamedTuple):
    """`unknown`: exact or not, there was a warning. `wrong`: another gradient, and nothing was said."""

    verdict: Verdict
    error: float  # of the gradient, relative
    said: str  # the warning, or the error


def judge(name: str, task: str, micro: int = 2) -> Judged:
    """Cut a batch into micro-batches with other numbers of labels, and compare with the whole.

    Raises:
        NotRunError: there is nothing to compare.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny(name, task)
            batch = batch_for(model, task)
            parameters = inspect.signature(model.forward).parameters
            if "attention_mask" not in parameters:
                batch.pop("attention_mask", None)
            loss_of(model, batch).backward()
        except NotRunError:
            raise
        except Exception as error:  # whatever a model says about a configuration or inputs that do not suit it
            raise NotRunError(f"{type(error).__name__}: {error}") from error
    expected = gradients_of(model)
    if not all(gradient is None or gradient.isfinite().all() for gradient in expected.values()):
        raise NotRunError("its gradient is not finite")
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            MacroStep(model, None, loss_of, micro=micro)(batch)
        except MacrobatchError as error:
            return Judged("refused", float("nan"), str(error))
    said = [str(one.message) for one in caught if "macrobatch" in str(one.filename) or "mean over" in str(one.message)]
    apart = relative_error(gradients_of(model), expected)
    verdict: Verdict = "unknown" if said else "exact" if apart < EXACT else "wrong"
    return Judged(verdict, apart, " ".join(said))
