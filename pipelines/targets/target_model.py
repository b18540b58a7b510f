"""A loaded target VLM: it encodes prompts, generates responses and captures hidden states.

Shapes: B samples, L positions, N tokens, A rotary axes, D hidden width, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from vlmdistill.drafters.core.batch import Head
from vlmdistill.drafters.core.target import room
from vlmdistill.drafters.core.transfer import place
from vlmdistill.drafters.decoding.acceptance import is_greedy
from vlmdistill.pipelines.targets.batching import CPU_BATCH, HalveOnOom, pad
from vlmdistill.pipelines.targets.capture import (
    DTYPES,
    FeatureRows,
    Leaving,
    Transcript,
)
from vlmdistill.pipelines.targets.checkpoints.fingerprint import (
    Fingerprint,
    fingerprint,
)
from vlmdistill.pipelines.targets.checkpoints.info import target_info
from vlmdistill.pipelines.targets.checkpoints.template import (
    VARIABLES,
    Thinking,
    switch_of,
    thinks,
)
from vlmdistill.pipelines.targets.encode import (
    EncodedPrompt,
    EncodedResponse,
    Finish,
    Messages,
    encode,
)
from vlmdistill.pipelines.targets.families.family import Family, Inputs, encode_visual
from vlmdistill.pipelines.targets.families.text_model import (
    LogitRule,
    embed_scale,
    logit_rules,
    text_model,
)
from vlmdistill.pipelines.targets.generation import Sampler
from vlmdistill.pipelines.targets.packed_weights import LMHead
from vlmdistill.pipelines.targets.software import versions
from vlmdistill.pipelines.targets.text_layers import LayerCache, LayerInputs, run_layers
from vlmdistill.stores.errors import DataError, PromptError, TargetError
from vlmdistill.stores.schema import (
    Feature,
    Provenance,
    Sample,
    TargetInfo,
    as_features,
)

LOGITS = 1024  # tokens whose logits over the vocabulary are held at once
UNREADABLE = "the stock model cannot read this prompt: its videos differ in length"


class _CaptureItem(NamedTuple):
    """A sequence to capture."""

    prompt: EncodedPrompt
    response: Sequence[int]
    key: str

    def length(self) -> int:
        """The tokens of the prompt and its response."""
        return self.prompt.length + len(self.response)


class StockChoices(NamedTuple):
    """The facts of the stock model's logits at N tokens of a response, for a comparison."""

    best_N: Tensor  # the token of the largest logit
    highest_N: Tensor  # the largest logit, float32
    given_N: Tensor  # the logit of the response's own token
    size_N: Tensor  # the largest absolute value of a logit

    @classmethod
    def of(cls, logits_NV: Tensor, token_N1: Tensor) -> "StockChoices":
        """From all logits and the tokens of the response."""
        highest_N, best_N = logits_NV.max(-1)
        given_N = logits_NV.gather(-1, token_N1)[:, 0]
        size_N = torch.maximum(highest_N, -logits_NV.amin(-1))
        return cls(best_N.cpu(), highest_N.cpu(), given_N.cpu(), size_N.cpu())


class TargetModel:
    """A loaded target, on one device or several: it encodes, generates and captures.

    `loading.load_for_capture` makes one.
    """

    def __init__(
        self,
        *,
        name: str,
        folder: Path,
        family: Family,
        model: Any,
        processor: Any,
        attention: str = "sdpa",
        thinking: Thinking = "",
    ):
        self.name = name
        self.folder = folder
        self.family = family
        self.model = model
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.thinking = thinking
        if thinking and self._switch is None:
            raise TargetError(
                f"{folder}: the chat template has no switch for reasoning "
                f"({' or '.join(VARIABLES)}), and thinking is to be {thinking}: leave "
                "out --thinking, or restore the template of the training"
            )
        self._text = text_model(model)
        self._eager = attention == "eager"
        self._checked = False
        self._halve_generate = HalveOnOom()
        self._halve_capture = HalveOnOom()
        pad_id = self.tokenizer.pad_token_id
        if pad_id is None:
            pad_id = self.info.eos_ids[0]
        self._pad_id = int(pad_id)
        # A checkpoint's own settings (greedy, top_k, repetition penalty) would change every `generate`.
        model.generation_config = self._generation_config()

    def _generation_config(self, **more: Any) -> transformers.GenerationConfig:
        return transformers.GenerationConfig(
            eos_token_id=list(self.info.eos_ids), pad_token_id=self._pad_id, **more
        )

    def __repr__(self) -> str:
        info = self.info
        size = sum(weight.numel() for weight in self.model.parameters())
        facts = (
            info.family,
            f"{size:,} parameters",
            f"{info.num_layers} layers",
            f"hidden size {info.hidden_size}",
            f"{self.dtype_name} on {self.device}",
        )
        return f"<{type(self).__name__} {self.name}: {', '.join(facts)}>"

    # Identity

    @cached_property
    def info(self) -> TargetInfo:
        """Facts that a drafter is built from, such as `hidden_size` (D) and `vocab_size` (V)."""
        return target_info(self.name, self.family, self.model, self.tokenizer)

    @cached_property
    def _logit_rule(self) -> LogitRule:
        """The rule that gives the stock model's logits, of those that the configuration allows for."""
        rules = logit_rules(self._text.config)
        if len(rules) == 1:
            return rules[0]
        eos_id = self.info.eos_ids[0]
        ids_12 = torch.tensor([[eos_id, eos_id]], device=self.device)
        with torch.inference_mode():
            hidden_2D = self.model.model(input_ids=ids_12).last_hidden_state[0]
            stock_2V = self.model(input_ids=ids_12).logits[0].float()
            weight_VD = self.model.get_output_embeddings().weight
            plain_2V = F.linear(hidden_2D, weight_VD).float()

        def error(rule: LogitRule) -> float:
            return float((rule(plain_2V) - stock_2V).abs().max())

        return min(rules, key=error)

    @cached_property
    def _head_VD(self) -> Tensor:
        weight_VD: Tensor = self.model.get_output_embeddings().weight
        scale = self._logit_rule.scale
        return weight_VD if scale == 1 else weight_VD * scale

    @cached_property
    def _head_for_rows(self) -> LMHead:
        return LMHead(self._head_VD)

    @property
    def head(self) -> Head:
        """The frozen `embed_VD` and `lm_head_VD` [vocabulary, hidden size], on the target's device."""
        return Head(embed_VD=self._embed_VD, lm_head_VD=self._head_VD)

    @cached_property
    def _embed_VD(self) -> Tensor:
        """The inputs of layer 0: some models scale their embeddings."""
        weight_VD: Tensor = self.model.get_input_embeddings().weight
        scale = embed_scale(self._text)
        return weight_VD if scale == 1 else weight_VD * scale

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Hashes of configuration, weights, processor and chat template."""
        return fingerprint(self.folder, self.processor.chat_template)

    @cached_property
    def step_bytes(self) -> int:
        """The bytes of the text layers and the LM head, which a decoding step reads once.

        All experts of a mixture are counted, although a step reads only some.
        """
        tensors = [self._head_VD]
        for layer in (*self._text.layers, self._text.norm):
            tensors += _tensors(layer)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def dtype_name(self) -> str:
        """The dtype of the weights, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    def provenance(
        self, features: Collection[str | Feature], dtype: str, sampling: str = ""
    ) -> Provenance:
        """The provenance that a store of these features records."""
        hashes = self.fingerprint
        names = sorted(feature.name for feature in as_features(features))
        return Provenance(
            target=self.name,
            config_hash=hashes.config,
            weights_hash=hashes.weights,
            processor_hash=hashes.processor,
            template_hash=hashes.template,
            features=tuple(names),
            dtype=dtype,
            revision=hashes.revision,
            sampling=sampling,
            thinking=self.thinking,
            engine="transformers",
            code_version=versions(("vlmdistill",))["vlmdistill"],
        )

    # Prompts and responses

    @cached_property
    def max_characters(self) -> int:
        """The most characters of a prompt: longer texts exceed the target's positions.

        No token has more characters than the longest of the vocabulary.
        """
        longest = max(map(len, self.tokenizer.get_vocab()))
        return int(self.info.max_position * longest)

    @cached_property
    def _switch(self) -> str | None:
        """The variable of the chat template that turns reasoning on and off."""
        return switch_of(self.processor)

    def encode(
        self, messages: Messages, thinking: Thinking | None = None
    ) -> EncodedPrompt:
        """Encode a conversation: chat template, tokens, pixels and rotary positions.

        Args:
            messages: Turns with `role` and `content`, as of OpenAI; the parts of a
                content are text, images (`{"type": "image", "image": file or PIL
                image}`) and videos.
            thinking: In place of the target's own mode, if its template has a switch.

        Returns:
            The prompt on the CPU: `ids_L` and `kind_L` (0 text, 1 image, 2 video) are
            int64 [L], with one position per visual token, and `spans` its runs of
            visual tokens.

        Raises:
            DataError: A part cannot be read or is not supported, or the prompt is too
                long.
        """
        mode = self.thinking if thinking is None else thinking
        variables: dict[str, bool | None] = {}
        if mode and self._switch is not None:
            variables[self._switch] = thinks(mode, messages)
        return encode(
            messages,
            family=self.family,
            model=self.model,
            processor=self.processor,
            max_length=self.info.max_position,
            max_characters=self.max_characters,
            variables=variables,
        )

    def generate(
        self,
        prompts: Sequence[EncodedPrompt],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> list[EncodedResponse]:
        """Generate a response to each prompt: greedy at temperature 0, else sampled.

        The same prompts, settings, seed and batch size give the same responses. A batch
        that exceeds the GPU's memory is halved.

        Args:
            prompts: See `encode`.
            max_new_tokens: Maximum length of a response, in tokens, EOS included; the
                target's last position ends it, too.
            temperature: 1 is the target's own distribution.
            top_p: Share of probability that nucleus sampling keeps; 1 keeps all.
            seed: Seed of the sampling.
            batch_size: Responses that are generated at a time; None: on a GPU as many as
                its memory holds, on a CPU 32.

        Returns:
            A response for each prompt: `ids` with the EOS that ends it, `text`, and
            `finish`, which is `stop` or `length`.

        Raises:
            DataError: A setting is out of range, or a prompt leaves no room for a
                response.
            TargetError: A single prompt exceeds the memory, or has states that are not
                finite.
        """
        responses = dict(
            self.responses(
                prompts,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                batch_size=batch_size,
            )
        )
        return [responses[number] for number in range(len(prompts))]

    def responses(
        self,
        prompts: Sequence[EncodedPrompt],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> Iterator[tuple[int, EncodedResponse]]:
        """As `generate`: the number of a prompt and its response, as each response ends."""
        _check_generation(max_new_tokens, temperature, top_p)
        sampler = Sampler(temperature, top_p, seed)

        def respond(
            batch: Sequence[EncodedPrompt],
        ) -> Iterator[tuple[int, EncodedResponse]]:
            limits = [
                min(max_new_tokens, room(self.info, prompt.length)) for prompt in batch
            ]
            generated = self._generate(batch, max(limits), sampler, batch_size)
            for number, ids in generated:
                yield number, self.response(ids[: limits[number]])

        return self._halve_generate.each(
            list(prompts), lambda prompt: prompt.length + max_new_tokens, respond
        )

    def _generate(
        self,
        prompts: Sequence[EncodedPrompt],
        max_new_tokens: int,
        sampler: Sampler,
        batch_size: int | None,
    ) -> Iterator[tuple[int, list[int]]]:
        """The number of each prompt and its tokens, with the EOS, by the stock `generate`."""
        inputs = None
        if len(prompts) <= (batch_size or CPU_BATCH):
            inputs = self._stock_inputs(prompts)
            if inputs is None:
                self._check_readable(prompts)
        if inputs is None:  # too many, or not in one batch
            middle = len(prompts) // 2
            for start, half in ((0, prompts[:middle]), (middle, prompts[middle:])):
                generated = self._generate(half, max_new_tokens, sampler, batch_size)
                for number, ids in generated:
                    yield start + number, ids
            return
        config = self._generation_config(
            max_new_tokens=max_new_tokens, **_sampling(sampler)
        )
        length = inputs["input_ids"].shape[1]

        def checked(ids_BL: Tensor, logits_BV: Tensor) -> Tensor:
            if ids_BL.shape[1] == length:
                self.check_finite(logits_BV)
            return logits_BV

        gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        with torch.inference_mode(), torch.random.fork_rng(devices=gpus):
            torch.manual_seed(sampler.seed)
            out_BL = self.model.generate(
                **inputs, generation_config=config, logits_processor=[checked]
            )
        for number, ids in enumerate(out_BL[:, length:].tolist()):
            yield number, self._until_eos(ids)

    def _check_readable(self, prompts: Sequence[EncodedPrompt]) -> None:
        """PromptError for one that the stock model cannot read, not even alone."""
        for number, prompt in enumerate(prompts):
            if self.family.stock_inputs(prompt.inputs) is None:
                raise PromptError(UNREADABLE, number)

    def _until_eos(self, ids: list[int]) -> list[int]:
        """The tokens up to the first EOS, itself included."""
        eos_ids = self.info.eos_ids
        for number, token in enumerate(ids):
            if token in eos_ids:
                return ids[: number + 1]
        return ids

    @torch.inference_mode()
    def reference(
        self, prompt: EncodedPrompt, *, max_new_tokens: int
    ) -> EncodedResponse | None:
        """The greedy response of the stock model's own `generate`, which decoding is checked against.

        None if the stock model cannot read the prompt.
        """
        inputs = self._stock_inputs([prompt])
        if inputs is None:
            return None
        most = min(max_new_tokens, room(self.info, prompt.length))
        config = self._generation_config(max_new_tokens=most, do_sample=False)
        out_1L = self.model.generate(**inputs, generation_config=config)
        return self.response(out_1L[0, prompt.length :].tolist())

    @torch.inference_mode()
    def stock_choices(
        self, prompt: EncodedPrompt, ids: Sequence[int]
    ) -> StockChoices | None:
        """The stock model's greedy choice at each token of a response, given the tokens before it.

        It is the model's own forward pass over the prompt and the response: if each token
        is its choice, the response is that of greedy decoding, up to rounding. None if
        the stock model cannot read the prompt.
        """
        parts: list[StockChoices] = []
        for start in range(0, len(ids), LOGITS):
            end = min(len(ids), start + LOGITS)
            sequences = [Transcript.of(prompt, ids[: end - 1])]
            inputs = self._stock_inputs([prompt], sequences)
            if inputs is None:
                return None
            with self._hidden_placeholders(inputs, sequences):
                output = self.model(
                    **inputs, use_cache=False, logits_to_keep=end - start
                )
            logits_NV = output.logits[0].float()
            token_N = torch.tensor(ids[start:end], device=self.device)
            parts.append(StockChoices.of(logits_NV, token_N[:, None]))
        return StockChoices(*map(torch.cat, zip(*parts, strict=True)))

    def response(self, ids: list[int]) -> EncodedResponse:
        """Generated token ids, with the EOS that ended them, as a response."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        finish: Finish = "stop" if ids[-1] in self.info.eos_ids else "length"
        return EncodedResponse(ids=tuple(ids), finish=finish, text=text)

    def _stock_inputs(
        self,
        prompts: Sequence[EncodedPrompt],
        sequences: Sequence[Transcript] | None = None,
    ) -> dict[str, Tensor] | None:
        """A batch for the stock model; None if it cannot take these prompts in one batch.

        Prompts are padded on the left, to be continued; `sequences`, which are prompts
        with their responses, on the right, and with their positions.
        """
        samples = [prompt.inputs for prompt in prompts]
        if not self.family.one_batch(samples):
            return None
        visual = self.family.stock_inputs(self.family.collate(samples))
        if visual is None:
            return None
        rows = sequences or prompts
        on_left = sequences is None
        ids = [row.ids_L for row in rows]
        ones = [torch.ones_like(ids_L) for ids_L in ids]
        inputs = {
            "input_ids": pad(ids, self._pad_id, on_left=on_left),
            "attention_mask": pad(ones, 0, on_left=on_left),
        }
        for name in self.family.kind_inputs(self.model):
            kinds = [row.kind_L for row in rows]
            inputs[name] = pad(kinds, 0, on_left=on_left)
        if sequences and self.family.mrope:
            rope_BAL = pad([row.rope_AL for row in rows], 0)
            inputs["position_ids"] = rope_BAL.transpose(0, 1)
        return self._on_device({**inputs, **visual})

    @contextmanager
    def _hidden_placeholders(
        self, inputs: dict[str, Tensor], sequences: Sequence[Transcript]
    ) -> Iterator[None]:
        """Make placeholders in responses ordinary tokens.

        Without this, the stock model would look for their images.
        """
        ids_BL = inputs["input_ids"]
        visual_BL = pad([sequence.visual_L for sequence in sequences], 0)
        visual_ids = ids_BL.new_tensor(self.info.visual_ids)
        placeholder_BL = torch.isin(ids_BL, visual_ids)
        stray_BL = placeholder_BL & ~visual_BL.to(ids_BL.device)
        if not stray_BL.any():
            yield
            return
        table = self.model.get_input_embeddings()
        embed_ND = table(ids_BL[stray_BL])
        inputs["input_ids"] = ids_BL.masked_fill(stray_BL, self._pad_id)

        def put_back(module: Any, args: Any, embed_BLD: Tensor) -> Tensor:
            values_ND = embed_ND.to(embed_BLD.dtype)
            return embed_BLD.masked_scatter(stray_BL[..., None], values_ND)

        handle = table.register_forward_hook(put_back)
        try:
            yield
        finally:
            handle.remove()

    def _on_device(
        self, inputs: Inputs, host: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """Visual inputs on the device, pixels in the model's dtype; `host` names stay on the CPU."""
        sent = {}
        for name, value in inputs.items():
            if name not in host:
                value = place(value, self.device)
            if name.startswith("pixel_values"):
                value = value.to(self.dtype)
            sent[name] = value
        return sent

    # Hidden states

    def capture(
        self,
        prompts: Sequence[EncodedPrompt],
        responses: Sequence[Sequence[int]],
        features: Collection[str | Feature],
        dtype: str = "bfloat16",
        keys: Sequence[str] | None = None,
    ) -> list[Sample]:
        """Run prompts with their responses teacher-forced, in one batch, and keep features.

        Args:
            prompts: See `encode`.
            responses: The token ids of the response to each prompt.
            features: What to keep, such as `hidden.text`; see `Feature`.
            dtype: Of the features: `bfloat16`, `float16` or `float32`.
            keys: A key for each sample; empty by default.

        Returns:
            A sample for each prompt, with features [T, U or M, hidden size], to add to a store.

        Raises:
            DataError: A name is not a feature, or features cannot be stored in that
                dtype.
            TargetError: The target has no such layer, or its LM head does not turn the
                captured states into its own logits.
        """
        batches = self.begin_capture(
            prompts, responses, as_features(features), dtype, keys
        )
        return [sample for batch in batches for sample in batch.samples()]

    def begin_capture(
        self,
        prompts: Sequence[EncodedPrompt],
        responses: Sequence[Sequence[int]],
        features: Collection[Feature],
        dtype: str = "bfloat16",
        keys: Sequence[str] | None = None,
    ) -> list[Leaving]:
        """`capture` without waiting for the device.

        Returns the batch, or its halves, on their way to the CPU.
        """
        if dtype not in DTYPES:
            raise DataError(
                f"features are stored as {', '.join(DTYPES)}, not as {dtype}"
            )
        readable = [
            prompt
            for prompt in prompts
            if self.family.stock_inputs(prompt.inputs) is not None
        ]
        if readable and not self._checked:
            self.check(min(readable, key=lambda prompt: prompt.length))
        keys = keys or [""] * len(prompts)
        items = [
            _CaptureItem(*item) for item in zip(prompts, responses, keys, strict=True)
        ]

        def run(batch: Sequence[_CaptureItem]) -> list[Leaving]:
            return [self._capture(batch, features, dtype)]

        return self._halve_capture(items, _CaptureItem.length, run)

    @torch.inference_mode()
    def _capture(
        self,
        items: Sequence[_CaptureItem],
        features: Collection[Feature],
        dtype: str,
    ) -> Leaving:
        prompts = [item.prompt for item in items]
        keys = [item.key for item in items]
        sequences = [Transcript.of(item.prompt, item.response) for item in items]
        rows = FeatureRows.of(sequences, features, self.device)
        sources = {feature.source for feature in features}
        states = self._states(prompts, sequences, sources)
        return Leaving.of(sequences, keys, rows.select(states), dtype)

    @torch.inference_mode()
    def check(self, prompt: EncodedPrompt) -> None:
        """Compare the logits of the captured states with the stock model's; TargetError if they differ.

        A drafter that is trained on wrong states is useless.
        """
        inputs = self._stock_inputs([prompt])
        if inputs is None:
            raise DataError(UNREADABLE)
        states = self._states([prompt], [Transcript.of(prompt)], ())
        last_1D = states["hidden"][:, -1]
        self.check_finite(last_1D)
        logits_V = self.logits(last_1D)[0]
        output = self.model(**inputs, logits_to_keep=1)
        stock_V = output.logits[0, -1].float()
        tolerance = 1e-3 if self.dtype == torch.float32 else 5e-2
        allowed = tolerance * float(stock_V.abs().max())
        worst = float((logits_V - stock_V).abs().max())
        if not worst <= allowed:
            raise TargetError(
                f"{self.folder}: the captured states do not give the target's own logits "
                f"(difference {worst:.3g}, allowed {allowed:.3g}): this checkpoint is "
                "not supported"
            )
        self._checked = True

    def check_finite(self, hidden_BD: Tensor) -> None:
        """PromptError for the first prompt whose last `hidden` state, or logits, are not finite.

        Such a prompt's response would be token 0 for ever, with and without a drafter.
        """
        finite_B = hidden_BD.isfinite().all(-1)
        if finite_B.all():
            return
        cure = "its weights may be damaged: download the checkpoint again"
        if self.dtype == torch.float16:
            cure = "their range is too small for it: use --target-dtype bfloat16, or float32"
        row = int(finite_B.logical_not().nonzero()[0])
        raise PromptError(
            f"{self.name} gives states that are not finite in {self.dtype_name}: {cure}",
            row,
        )

    @torch.inference_mode()
    def check_runs(self) -> None:
        """`check_finite` of a prompt of one word, and of all its logits."""
        content = [{"type": "text", "text": "Hello"}]
        prompt = self.encode([{"role": "user", "content": content}])
        states = self._states([prompt], [Transcript.of(prompt)], ())
        last_1D = states["hidden"][:, -1]
        self.check_finite(last_1D)
        self.check_finite(self.logits(last_1D))

    @torch.inference_mode()
    def norm(self, state_ND: Tensor) -> Tensor:
        """The final norm on outputs of the last layer [N, D]: `hidden`."""
        hidden_ND: Tensor = self._text.norm(state_ND)
        return hidden_ND

    @torch.inference_mode()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """The LM head on `hidden` states, float32 [N, V]."""
        return self._logit_rule.limited(self._head_for_rows.times(hidden_ND).float())

    def _states(
        self,
        prompts: Sequence[EncodedPrompt],
        sequences: Sequence[Transcript],
        sources: Collection[str],
        cache: LayerCache | None = None,
    ) -> dict[str, Tensor]:
        """States [B, L, D] of a right-padded batch; attention is causal, so padding needs no mask."""
        return self._run(self._embed(prompts, sequences), sources, cache)

    def _embed(
        self, prompts: Sequence[EncodedPrompt], sequences: Sequence[Transcript]
    ) -> LayerInputs:
        """The input of layer 0, with the outputs of the vision tower at visual positions."""
        visual_BL = pad([sequence.visual_L for sequence in sequences], 0)
        rope_BAL = pad([sequence.rope_AL for sequence in sequences], 0)
        ids_BL = pad([sequence.ids_L for sequence in sequences], self._pad_id)
        visual_U = visual_BL.flatten().nonzero().flatten()
        hidden_BLD = self._text.embed_tokens(place(ids_BL, self.device))
        embedded = LayerInputs(
            hidden_BLD=hidden_BLD,
            rope_ABL=place(rope_BAL, self.device).transpose(0, 1),
            visual_U=place(visual_U, self.device),
        )
        inputs = self.family.collate([prompt.inputs for prompt in prompts])
        if not inputs:
            return embedded
        kinds = [sequence.kind_L[sequence.visual_L] for sequence in sequences]
        sent = self._on_device(inputs, host=self.family.host_inputs)
        try:
            visual = encode_visual(self.family, self.model, sent, torch.cat(kinds))
        except TargetError as error:
            raise TargetError(f"{self.folder}: {error}") from None
        embed_UD = visual.embed_UD.to(hidden_BLD.dtype)
        hidden_BLD.flatten(0, 1).index_copy_(0, embedded.visual_U, embed_UD)
        return replace(embedded, deepstack=visual.deepstack)

    def _run(
        self, embedded: LayerInputs, sources: Collection[str], cache: LayerCache | None
    ) -> dict[str, Tensor]:
        return run_layers(
            self._text, embedded, eager=self._eager, sources=sources, cache=cache
        )


def _check_generation(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """DataError if a setting of `generate` is out of range."""
    is_temperature = 0 <= temperature < float("inf")
    if max_new_tokens < 1 or not is_temperature or not 0 < top_p <= 1:
        raise DataError(
            f"cannot generate with max_new_tokens {max_new_tokens} (at least 1), "
            f"temperature {temperature} (at least 0), top_p {top_p} (above 0, up to 1)"
        )


def _sampling(sampler: Sampler) -> dict[str, Any]:
    """The settings of the stock `generate` for a sampler."""
    if is_greedy(sampler.temperature):
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampler.temperature,
        "top_p": sampler.top_p,
        "top_k": 0,
    }


def _tensors(module: torch.nn.Module) -> list[Tensor]:
    """The weights of a module, quantized ones too."""
    return [*module.parameters(), *module.buffers()]
