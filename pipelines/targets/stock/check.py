"""The self-test of a target: does the description of its family match the model?

The description may be one of `families`, or found from the model. Each comparison is with
the stock model of the same weights, run the plain way: a fresh processor, one prompt, no
cache, the model's own positions and masks. A family without a written description is
supported if it passes, and refused if it does not.

Shapes: L positions, N tokens, D hidden width, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlmdistill.pipelines.targets.checkpoints.folder import first_line
from vlmdistill.pipelines.targets.encode import EncodedPrompt
from vlmdistill.pipelines.targets.stock.decoder import watched
from vlmdistill.pipelines.targets.vision_language import VisionLanguageTarget
from vlmdistill.stores.errors import TargetError
from vlmdistill.stores.schema import Feature, Sample

# Allowed differences of states or logits, relative to the largest.
ALLOWED = {torch.float32: 1e-3}
ALLOWED_HALF = 5e-2
RESPONSE = 12  # tokens
LONGEST = 9000  # tokens of a prompt that exceeds a window; a longer window is not tried
SIZES = ((224, 160), (120, 300))  # of the images
HIDDEN = Feature("hidden", "text")
LONGER_QUESTION = "A longer question, this time."


@dataclass(frozen=True)
class Comparison:
    """A line of the self-test; `failed` is the difference, empty if there is none."""

    name: str
    what: str
    failed: str = ""


def prove(target: VisionLanguageTarget) -> None:
    """TargetError with the first line of the self-test that fails."""
    for line in lines(target):
        if line.failed:
            raise TargetError(
                f"{target.name}: a {target.family.name} is not supported as it is: "
                f"{line.name}: {line.failed}"
            )


def lines(target: VisionLanguageTarget) -> Iterator[Comparison]:
    """The self-test, line by line, to the first failure: later lines rest on earlier ones."""
    test = _SelfTest(target)
    comparisons = (
        (
            "template",
            "the checkpoint's own chat template and processor give the same tokens",
            test.template,
        ),
        ("ids", "as many placeholders as the vision tower gives tokens", test.ids),
        (
            "spans",
            "images enter the text model at the spans, and each at its own",
            test.spans,
        ),
        (
            "states",
            "the captured input of a layer is what the layers from there on turn into "
            "the last",
            test.states,
        ),
        (
            "logits",
            "last states, through the LM head, are the model's logits",
            test.logits,
        ),
        ("batch", "a batch of prompts gives the states of each alone", test.batch),
        ("response", "a greedy response is that of the stock generate", test.response),
        (
            "drafts",
            "tree, chain and one token at a time give the states of the plain forward "
            "pass",
            test.drafts,
        ),
        (
            "window",
            "the same after a prompt that is longer than the window of a layer",
            test.window,
        ),
    )
    for name, claim, compare in comparisons:
        try:
            with torch.inference_mode():
                failed = compare()
        except Exception as error:  # noqa: BLE001 - a model's code raises anything
            failed = f"{type(error).__name__}: {first_line(error)}"
        yield Comparison(name, claim, failed)
        if failed:
            return


@dataclass(frozen=True)
class _StockPass:
    """One plain forward pass of the stock model."""

    embed_LD: Tensor  # the input of layer 0
    last_LD: Tensor  # after the final norm
    logits_LV: Tensor  # float32


class _Stock:
    """The stock model, run the plain way."""

    def __init__(self, target: VisionLanguageTarget):
        self.model = target.model
        self.processor = target.family.load_processor(target.folder)
        self._device = target.device
        self._dtype = target.dtype

    def inputs(self, messages: Any) -> dict[str, Tensor]:
        """The processor's output for a conversation, on the model's device."""
        batch = self.processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        inputs = {}
        for name, value in batch.items():
            if torch.is_tensor(value):
                dtype = self._dtype if value.is_floating_point() else None
                inputs[name] = value.to(self._device, dtype)
        return inputs

    def run(
        self, inputs: Mapping[str, Tensor], response: Sequence[int] = ()
    ) -> _StockPass:
        """A forward pass over a prompt and the tokens after it."""
        if hasattr(self.model.model, "rope_deltas"):  # of the prompt before
            self.model.model.rope_deltas = None
        text_model = self.model.get_decoder()
        outputs: list[Tensor] = []
        handle = text_model.register_forward_hook(
            lambda *io: outputs.append(io[-1].last_hidden_state)
        )
        extended = _extended(inputs, response)
        try:
            with watched(text_model.layers, ("embed",)) as states:
                logits_1LV = self.model(**extended, use_cache=False).logits
        finally:
            handle.remove()
        return _StockPass(
            embed_LD=states["embed"][0],
            last_LD=outputs[0][0],
            logits_LV=logits_1LV[0].float(),
        )

    @contextmanager
    def replaced(self, layer: int, state_LD: Tensor) -> Iterator[None]:
        """Replace the input of a layer."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            state_1LD = state_LD[None].to(self._device, self._dtype)
            if args:
                return (state_1LD, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": state_1LD}

        module = self.model.get_decoder().layers[layer]
        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _extended(
    inputs: Mapping[str, Tensor], response: Sequence[int]
) -> dict[str, Tensor]:
    """The inputs of a prompt with the tokens of a response after it."""
    extended = dict(inputs)
    prompt_shape = inputs["input_ids"].shape
    for name, value_1L in inputs.items():
        if value_1L.shape != prompt_shape:
            continue  # pixels and grids
        if name == "input_ids":
            new_1N = torch.tensor([list(response)], dtype=value_1L.dtype)
        else:  # a mask or the kinds of positions: text is 0
            fill = int(name == "attention_mask")
            new_1N = torch.full((1, len(response)), fill)
        extended[name] = torch.cat([value_1L, new_1N.to(value_1L)], 1)
    return extended


@dataclass(frozen=True)
class _DraftTree:
    """Two branches of three tokens each, from the root of a tree, and a token after them."""

    left_ids: list[int]
    right_ids: list[int]
    after_id: int
    ids: list[int]  # of both branches, level by level
    rows: dict[str, list[int]]  # of each branch in `ids`, by name
    depth_N: Tensor
    visible_NN: Tensor

    @classmethod
    def of(cls, target: VisionLanguageTarget) -> "_DraftTree":
        """A tree of ordinary tokens of the target's vocabulary."""
        info = target.info
        special = {*info.visual_ids, *info.eos_ids}
        spread = [int(i) for i in torch.linspace(3, info.vocab_size - 1, 8)]
        tokens = [token for token in spread if token not in special][:6]
        left_ids = tokens[:3]
        right_ids = [*tokens[1:3], tokens[0]]
        levels = zip(left_ids, right_ids, strict=True)
        rows = {"left": [0, 2, 4], "right": [1, 3, 5]}
        visible_NN = torch.eye(6, dtype=torch.bool, device=target.device)
        for branch in rows.values():
            for depth, row in enumerate(branch):
                visible_NN[row, branch[: depth + 1]] = True
        return cls(
            left_ids=left_ids,
            right_ids=right_ids,
            after_id=tokens[-1],
            ids=[token for level in levels for token in level],
            rows=rows,
            depth_N=torch.tensor([1, 1, 2, 2, 3, 3], device=target.device),
            visible_NN=visible_NN,
        )


class _SelfTest:
    """The comparisons, in order; each returns the difference, empty if there is none."""

    def __init__(self, target: VisionLanguageTarget):
        self.target = target
        self.messages = _messages("What is in these two pictures?", 0, 1)

    @property
    def prompt(self) -> EncodedPrompt:
        return self.target.encode(self.messages)

    def template(self) -> str:
        self.stock = _Stock(self.target)
        for messages in (_messages("Hello!"), _messages("One.", 1), self.messages):
            self.inputs = self.stock.inputs(messages)
            stock_ids = self.inputs["input_ids"][0].tolist()
            ids = self.target.encode(messages).ids_L.tolist()
            if stock_ids != ids:
                position = _first_difference(stock_ids, ids)
                if position is None:  # one continues the other
                    position = min(len(stock_ids), len(ids))
                return (
                    f"the checkpoint's own gives {len(stock_ids)} tokens, and here "
                    f"{len(ids)}; the first that differs is number {position}"
                )
        return ""

    def ids(self) -> str:
        prompt = self.prompt
        if not prompt.inputs:
            return "the processor's output has no pixels"
        inputs = self.target._on_device(prompt.inputs)
        visual = self.target.family.encode_images(self.target.model, inputs)
        tokens = len(visual.embed_UD)
        placeholders = int(prompt.visual_L.sum())
        if placeholders != tokens:
            return f"{placeholders} placeholders, and {tokens} visual tokens"
        return ""

    def spans(self) -> str:
        prompt = self.prompt
        embed_LD = self.stock.run(self.inputs).embed_LD
        if difference := self._outside_spans(prompt, embed_LD):
            return difference
        return self._other_spans(prompt, embed_LD)

    def _outside_spans(self, prompt: EncodedPrompt, embed_LD: Tensor) -> str:
        """Positions at which the input of layer 0 is visual and no span is, or the reverse."""
        inside_L = torch.zeros(prompt.length, dtype=torch.bool)
        for span in prompt.spans:
            inside_L[span.start : span.start + span.length] = True
        table_LD = self.target.head.embed_VD[prompt.ids_L.to(embed_LD.device)]
        change_L = (embed_LD - table_LD).abs().amax(-1)
        changed_L = (change_L > 1e-5 * table_LD.abs().max()).cpu()
        wrong_N = torch.nonzero(changed_L != inside_L).flatten()
        if not len(wrong_N):
            return ""
        position = int(wrong_N[0])
        kind = "not a visual token"
        if changed_L[position]:
            kind = "a visual token outside of all spans"
        return f"{len(wrong_N)} positions are wrong: position {position} is {kind}"

    def _other_spans(self, prompt: EncodedPrompt, embed_LD: Tensor) -> str:
        """Whether another second image changes positions from another span's start on."""
        messages = _messages("What is in these two pictures?", 0, 2)
        other_LD = self.stock.run(self.stock.inputs(messages)).embed_LD
        change_L = (other_LD - embed_LD).abs().amax(-1)
        moved_N = torch.nonzero(change_L.cpu() > 0).flatten()
        first = int(moved_N[0]) if len(moved_N) else prompt.length
        if first not in {span.start for span in prompt.spans[1:]}:
            return (
                f"the second image's tokens begin at position {first}, where no span "
                "does"
            )
        return ""

    def states(self) -> str:
        last = self.target.info.num_layers - 1
        layers = sorted({0, 1, last // 2, last})
        features = []
        for layer in layers:
            source = f"layer{layer}"
            features += [Feature(source, "text"), Feature(source, "visual")]
        samples = self.target.capture([self.prompt], [[]], features, "float32")
        expected_LD = self.stock.run(self.inputs).last_LD
        for layer in layers:
            source = f"layer{layer}"
            state_LD = self._whole(samples[0], source)
            with self.stock.replaced(layer, state_LD):
                last_LD = self.stock.run(self.inputs).last_LD
            with self.stock.replaced(layer, state_LD.flip(0)):
                flipped_LD = self.stock.run(self.inputs).last_LD
            if torch.equal(flipped_LD, last_LD):
                return f"the input of layer {layer} has no effect"
            if difference := self._difference(last_LD, expected_LD):
                return f"{source} is not the input of layer {layer}: {difference}"
        return ""

    def _whole(self, sample: Sample, source: str) -> Tensor:
        """A captured state at all positions."""
        text_TD = torch.from_numpy(sample.features[Feature(source, "text")])
        visual_UD = torch.from_numpy(sample.features[Feature(source, "visual")])
        visual_L = self.prompt.visual_L
        state_LD = text_TD.new_zeros(len(visual_L), text_TD.shape[1])
        state_LD[~visual_L] = text_TD
        state_LD[visual_L] = visual_UD
        return state_LD

    def logits(self) -> str:
        prompt = self.prompt
        expected_LV = self.stock.run(self.inputs).logits_LV
        hidden_TD = self._hidden(prompt).to(self.target.device, self.target.dtype)
        text_L = ~prompt.visual_L.to(expected_LV.device)
        return self._difference(self.target.logits(hidden_TD), expected_LV[text_L])

    def batch(self) -> str:
        longer = self.target.encode(_messages(LONGER_QUESTION))
        longer_with_image = self.target.encode(_messages(LONGER_QUESTION, 1))
        prompts = [self.prompt, longer, longer_with_image]
        responses: list[list[int]] = [[7, 8], [9], []]
        batched = self.target.capture(prompts, responses, [HIDDEN], "float32")
        for number, prompt in enumerate(prompts):
            batched_TD = torch.from_numpy(batched[number].features[HIDDEN])
            alone_TD = self._hidden(prompt, responses[number])
            if difference := self._difference(batched_TD, alone_TD):
                return f"prompt {number + 1} of 3: {difference}"
        return ""

    def _hidden(self, prompt: EncodedPrompt, response: Sequence[int] = ()) -> Tensor:
        """The captured last states at text positions, float32 [T, D]."""
        samples = self.target.capture([prompt], [response], [HIDDEN], "float32")
        return torch.from_numpy(samples[0].features[HIDDEN])

    def response(self) -> str:
        conversations = (self.messages, _messages(LONGER_QUESTION))
        prompts = [self.target.encode(messages) for messages in conversations]
        responses = self.target.generate(
            prompts, max_new_tokens=RESPONSE, temperature=0
        )
        config = self.target._generation_config(
            max_new_tokens=RESPONSE, do_sample=False
        )
        for number, messages in enumerate(conversations):
            inputs = self.stock.inputs(messages)
            out_1L = self.stock.model.generate(**inputs, generation_config=config)
            prompt_length = inputs["input_ids"].shape[1]
            stock_ids = out_1L[0, prompt_length:].tolist()
            ids = list(responses[number].ids)
            if difference := self._token_difference(inputs, ids, stock_ids):
                return f"prompt {number + 1} of 2: {difference}"
        return ""

    def _token_difference(
        self, inputs: dict[str, Tensor], ids: list[int], stock_ids: list[int]
    ) -> str:
        """The first token that differs; of tokens as likely but for rounding, either may be chosen."""
        position = _first_difference(ids, stock_ids)
        if position is None:
            return ""
        token, stock_token = ids[position], stock_ids[position]
        stock_pass = self.stock.run(inputs, stock_ids[:position])
        logits_V = stock_pass.logits_LV[-1]
        difference = float(logits_V[stock_token] - logits_V[token])
        if difference <= self._allowed * float(logits_V.abs().max()):
            return ""
        return f"token {position + 1} is {token}, and the stock model's {stock_token}"

    def drafts(self) -> str:
        return self._drafts(self.prompt, self.inputs)

    def window(self) -> str:
        config = self.target.model.get_decoder().config
        sliding = getattr(config, "sliding_window", None)
        chunk = getattr(config, "attention_chunk_size", None)
        windows = [int(window) for window in (sliding, chunk) if window]
        window = min(windows, default=LONGEST)
        if window >= min(LONGEST, self.target.info.max_position - 64):
            return ""
        messages = _messages("word " * (window + 8), 1)
        prompt = self.target.encode(messages)
        return self._drafts(prompt, self.stock.inputs(messages))

    def _drafts(self, prompt: EncodedPrompt, inputs: dict[str, Tensor]) -> str:
        """Drafted tokens as a tree, as a chain, after accepted ones, and one by one."""
        tree = _DraftTree.of(self.target)
        expected = {}
        for branch, rows in tree.rows.items():
            ids = [tree.ids[row] for row in rows]
            expected[branch] = self._states_after(prompt, inputs, ids)
        right_ND = expected["right"]
        return (
            self._tree(prompt, tree, expected)
            or self._chain(tree, right_ND)
            or self._after_accepted(prompt, inputs, tree)
            or self._one_by_one(prompt, tree.right_ids, right_ND)
        )

    def _states_after(
        self, prompt: EncodedPrompt, inputs: dict[str, Tensor], ids: list[int]
    ) -> Tensor:
        """The stock model's last states at tokens after a prompt [N, D]."""
        return self.stock.run(inputs, ids).last_LD[prompt.length :]

    def _tree(
        self, prompt: EncodedPrompt, tree: _DraftTree, expected: Mapping[str, Tensor]
    ) -> str:
        self.target.prefill(prompt)
        hidden_ND = self._extend(tree.ids, tree.depth_N, tree.visible_NN)
        for branch, rows in tree.rows.items():
            if difference := self._difference(hidden_ND[rows], expected[branch]):
                return f"the {branch} branch of a tree: {difference}"
        return ""

    def _chain(self, tree: _DraftTree, expected_ND: Tensor) -> str:
        depth_3 = self._depths(3)
        causal_33 = depth_3[:, None] >= depth_3
        hidden_ND = self._extend(tree.right_ids, depth_3, causal_33)
        if difference := self._difference(hidden_ND, expected_ND):
            return f"a chain: {difference}"
        return ""

    def _after_accepted(
        self, prompt: EncodedPrompt, inputs: dict[str, Tensor], tree: _DraftTree
    ) -> str:
        """Commits the right branch of a tree, then one token of a chain of two."""
        self._extend(tree.ids, tree.depth_N, tree.visible_NN)
        self.target.commit(tree.rows["right"])
        chain = [tree.after_id, tree.left_ids[0]]
        after_ND = self._states_after(prompt, inputs, [*tree.right_ids, *chain])
        expected_ND = after_ND[len(tree.right_ids) :]
        hidden_ND = self._extend(chain, self._depths(2))
        if difference := self._difference(hidden_ND, expected_ND):
            return f"after a branch that was accepted: {difference}"
        self.target.commit([0])
        hidden_ND = self._extend(chain[1:], self._depths(1))
        if difference := self._difference(hidden_ND, expected_ND[1:]):
            return f"after a chain of which one token was accepted: {difference}"
        return ""

    def _one_by_one(
        self, prompt: EncodedPrompt, ids: list[int], expected_ND: Tensor
    ) -> str:
        self.target.prefill(prompt)
        for number, token in enumerate(ids):
            hidden_1D = self._extend([token], self._depths(1))
            expected_1D = expected_ND[number : number + 1]
            if difference := self._difference(hidden_1D, expected_1D):
                return f"token {number + 1} of a response: {difference}"
            self.target.commit([0])
        return ""

    def _extend(
        self, ids: list[int], depth_N: Tensor, visible_NN: Tensor | None = None
    ) -> Tensor:
        """The target's last states of drafted tokens [N, D]."""
        ids_N = torch.tensor(ids, device=self.target.device)
        return self.target.extend(ids_N, depth_N, visible_NN)["hidden"]

    def _depths(self, count: int) -> Tensor:
        """The depths of a chain: 1, 2, ..."""
        return torch.arange(1, count + 1, device=self.target.device)

    @property
    def _allowed(self) -> float:
        return ALLOWED.get(self.target.dtype, ALLOWED_HALF)

    def _difference(self, values: Tensor, expected: Tensor) -> str:
        """The largest difference, if it is more than rounding."""
        if values.shape != expected.shape:
            return f"{tuple(values.shape)} is not {tuple(expected.shape)}"
        values = values.float().cpu()
        expected = expected.float().cpu()
        worst = float((values - expected).abs().max())
        scale = float(expected.abs().max())
        if worst <= self._allowed * scale:
            return ""
        return f"they differ by {worst:.2g} of {scale:.2g}"


def _first_difference(ids: Sequence[int], other_ids: Sequence[int]) -> int | None:
    """The first index at which both have a token, and not the same one."""
    for position, (token, other) in enumerate(zip(ids, other_ids, strict=False)):
        if token != other:
            return position
    return None


def _messages(text: str, *images: int) -> list[dict[str, Any]]:
    """One user turn with generated pictures; 2 is another picture of the size of 1."""
    content: list[dict[str, Any]] = []
    for number in images:
        content.append({"type": "image", "image": _picture(number)})
    content.append({"type": "text", "text": text})
    return [{"role": "user", "content": content}]


def _picture(number: int) -> Image.Image:
    width, height = SIZES[min(number, 1)]
    generator = torch.Generator().manual_seed(number)
    pixels_HWC = torch.randint(
        0, 256, (height, width, 3), generator=generator, dtype=torch.uint8
    )
    return Image.fromarray(pixels_HWC.numpy())
