"""Multimodal personalised Transformer in three sizes: any set of modalities as one sequence of tokens.

Cao, Sun and Yu, "Multimodal personalized federated learning based on Transformer", Journal of UESTC 54(2), 2025. The
segments x_i of modality m become tokens

    z_i = Concat(v_m, x_i M_m),   M_m = lambda M_loc + (1 - lambda) M_up          (Eq. 7, 8, 10)

and all tokens of a sample go through one Transformer. M_loc exists only where a method asks for it. The paper does not
say where order enters or how a sample is read out: here a learned position p_i is added to x_i M_m (an option), and the
features are the mean over the sample's modalities of the mean of each one's last states. So every modality counts the
same, whatever its number of segments, an absent one leaves the features' scale as it is, and the readout has no tensor
that only some clients' samples train.

Magneto: Transformer layers with sub-LayerNorm and its initialisation, and plain pre-norm layers.

Wang et al., "Magneto: A Foundation Transformer", ICML 2023, as the library torchscale has it. Per layer

    x <- x + W_O LN(heads(LN(x))),    x <- x + W_2 LN(GELU(W_1 LN(x))),

and a last layer normalisation behind all layers. The inner two normalisations are what "sub-LN" adds to the ordinary
pre-norm layer. With N layers, the values of W_V, W_O, W_1 and W_2 start larger by gamma = sqrt(ln 2N).

How samples are cut is in :mod:`confed.models.modal_segments`.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from confed.federation.ownership import MODALITIES
from confed.federation.protocols import Batch, Output
from confed.federation.ranges import SHARE, check_value
from confed.federation.specs import ModelSpec
from confed.models.adapters import Host
from confed.models.encoders import encoder_source
from confed.models.finetuning import Places
from confed.models.heads import COUNT, check_divides, count
from confed.models.inputs import picture_fit, picture_side
from confed.models.modal_segments import (
    ClipPatches,
    EncoderCells,
    LogMelFrames,
    Patches,
    Segmenter,
    SeriesWindows,
    WaveFrames,
    Words,
    checked_modalities,
    clip_encoder,
    patch_side,
)
from confed.models.pretrained import seeded
from confed.models.tokenizer import BertTokenizer, WordTokenizer, bert_tokenizer
from confed.models.variants import variant

Block = Literal["magneto", "prenorm"]
"""Layers with sub-LayerNorm and scaled initial values; ordinary pre-norm layers with neither."""
MagnetoInit = Literal["torchscale", "paper"]  # initial values as the authors' library has them, or as the paper says


def magneto_gain(layers: int) -> float:
    """The factor gamma = sqrt(ln 2N) of an encoder, or of a decoder alone, with N layers (Magneto)."""
    check_value(layers, COUNT, "layers")
    return math.sqrt(math.log(2 * layers))


class Attention(nn.Module):
    """Multi-head attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int, inner_norm: bool = False) -> None:
        super().__init__()
        check_divides(heads, width, "model.attention_heads")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.inner_norm = nn.LayerNorm(width) if inner_norm else None
        self.out_proj = nn.Linear(width, width)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """What the tokens ``x`` read in ``context``."""
        if context is None:
            query, key, value = self.qkv(x).chunk(3, -1)
        else:
            width, weight, bias = x.shape[-1], self.qkv.weight, self.qkv.bias
            query = F.linear(x, weight[:width], bias[:width])
            key, value = F.linear(context, weight[width:], bias[width:]).chunk(2, -1)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value))
        seen = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal).transpose(1, 2).flatten(2)
        return self.out_proj(seen if self.inner_norm is None else self.inner_norm(seen))


class EncoderLayer(nn.Module):
    """One pre-norm layer, with sub-LayerNorm or without."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, sub_norm: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, sub_norm)
        self.ffn_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.inner_norm = nn.LayerNorm(hidden) if sub_norm else None
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """The next states of the tokens, (B, S, d); arguments as :meth:`Attention.forward`.

        A ``context`` goes through the same normalisation as the tokens.
        """
        other = None if context is None else self.attention_norm(context)
        x = x + self.dropout(self.attention(self.attention_norm(x), other, mask, causal))
        inner = F.gelu(self.fc1(self.ffn_norm(x)))
        return x + self.dropout(self.fc2(inner if self.inner_norm is None else self.inner_norm(inner)))

    @torch.no_grad()
    def reset_parameters(self, gain: float, init: MagnetoInit = "torchscale") -> None:
        """Draws the initial values of all matrices and biases, from the current default generator.

        "torchscale": W_Q, W_K and W_V from Xavier's uniform distribution with gain 1/sqrt(2), W_O with gain 1 and no
        bias, all else as PyTorch has it; then W_V, W_O, W_1, W_2 *and their biases* are multiplied by gamma. "paper":
        from Xavier's normal distribution, with gain gamma for these four and 1 for W_Q and W_K; the paper says nothing
        of biases, which start at zero.
        """
        width = self.attention.out_proj.in_features
        out, inner = self.attention.out_proj, (self.fc1, self.fc2)
        value_bias = self.attention.qkv.bias[2 * width :]
        parts = self.attention.qkv.weight.split(width)
        if init == "paper":
            for projection, scale in zip(parts, (1.0, 1.0, gain), strict=True):
                nn.init.xavier_normal_(projection, scale)
            for layer in (out, *inner):
                nn.init.xavier_normal_(layer.weight, gain)
            for layer in (self.attention.qkv, out, *inner):
                nn.init.zeros_(layer.bias)
            return
        for layer in inner:
            layer.reset_parameters()
        # a fused matrix has the rows of three; the bound of a bias depends on the inputs alone.
        self.attention.qkv.reset_parameters()
        for projection in parts:
            nn.init.xavier_uniform_(projection, 1 / math.sqrt(2))
        nn.init.xavier_uniform_(out.weight)
        nn.init.zeros_(out.bias)
        scaled = [parts[2], value_bias]
        for layer in (out, *inner):
            scaled += [layer.weight, layer.bias]
        for tensor in scaled:
            tensor.mul_(gain)


class Encoder(nn.Module):
    """Layers in sequence, then a layer normalisation.

    With ``causal`` it is a decoder of text alone: nothing else differs, and gamma is the same.
    Initial values come from PyTorch's default generator; see :func:`confed.models.pretrained.seeded`.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        hidden: int,
        dropout: float = 0.0,
        *,
        block: Block = "magneto",
        magneto_init: MagnetoInit = "torchscale",
    ) -> None:
        super().__init__()
        self.width = width
        self.dropout = nn.Dropout(dropout)
        sub_norm = block == "magneto"
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = EncoderLayer(width, heads, hidden, dropout, sub_norm)
            layer.reset_parameters(
                magneto_gain(layers) if sub_norm else 1.0, magneto_init if sub_norm else "torchscale"
            )
            self.layers.append(layer)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, present: Tensor | None = None, causal: bool = False) -> Tensor:
        """The last states of the tokens, (B, S, d)."""
        mask = None if present is None else present[:, None, None, :]
        if mask is not None and causal:
            mask, causal = causal_mask(mask), False
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, mask=mask, causal=causal)
        return self.norm(x)


def causal_mask(present: Tensor) -> Tensor:
    """Which tokens each sees, bool (B, 1, S, S), of those present (B, 1, 1, S): those before it, and itself."""
    square = torch.ones(present.shape[-1], present.shape[-1], dtype=torch.bool, device=present.device)
    itself = torch.eye(len(square), dtype=torch.bool, device=present.device)
    return (present | itself) & square.tril()


Vector = Literal["learned", "one_hot"]
"""Modality vectors v_m that learn, or fixed ones with a 1 at the modality's place."""

SPREAD = 1 / math.sqrt(3)
"""Standard deviation of fresh positions and modality vectors: that of a mapped segment of unit variance."""


class Tokens(NamedTuple):
    states: Tensor
    present: Tensor | None  # which are no padding, bool (B, S); None where none is
    spans: Mapping[str, slice]  # modality -> its tokens, in the order of the sequence


class ModalEmbedding(nn.Module):
    """Everything of one modality: its segments, its maps, its vector and its positions."""

    vector: Tensor | None

    def __init__(
        self,
        modality: str,
        segments: Segmenter,
        width: int,
        vector_width: int,
        *,
        vector: Vector = "learned",
        positions: bool = True,
    ) -> None:
        super().__init__()
        least = len(MODALITIES) if vector == "one_hot" else 0
        if vector_width < least or width < 1:
            raise ValueError(
                f"model.vector_width must be at least {least} for {vector!r} vectors and less than model.width, got "
                f"{vector_width} of {width + vector_width}"
            )
        self.segments = segments
        self.shared = nn.Linear(segments.width, width, bias=False)  # the exchanged map M_up
        self.local: nn.Linear | None = None  # the client's own map M_loc, once there is one
        self.lam = 0.0
        if vector_width == 0:
            self.vector = None
        elif vector == "learned":
            self.vector = nn.Parameter(nn.init.normal_(torch.empty(vector_width), std=SPREAD))
        else:
            # A modality's place does not depend on which others a model has.
            place = torch.arange(vector_width) == MODALITIES.index(modality)
            self.register_buffer("vector", place.float())
        self.position: nn.Parameter | None = None
        if positions:
            self.position = nn.Parameter(nn.init.normal_(torch.empty(segments.limit, width), std=SPREAD))

    @property
    def map(self) -> Tensor:
        """M_m, laid out as the weight of a linear layer, (d, L)."""
        if self.local is None:
            return self.shared.weight
        # Of equal maps this is that map, to the bit, and for a lambda of 0 it is the shared one.
        return torch.lerp(self.shared.weight, self.local.weight, self.lam)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Tokens (B, n, d_v + d) of a batch that has this modality, and which are no padding, bool (B, n) or None."""
        x, present = self.segments(batch)
        x = nn.functional.linear(x, self.map)
        if self.position is not None:
            x = x + self.position[: x.shape[1]]
        if self.vector is not None:
            x = torch.cat([self.vector.to(x.dtype).expand(*x.shape[:2], -1), x], 2)
        return x, present


class ModalNetwork(nn.Module):
    """A module per modality.

    Every batch has one set of modalities, which may differ from batch to batch; only these are computed. Modalities
    that the model does not have are not read.
    """

    reads_absent: ClassVar[bool] = True
    """Whether batches may lack some of the modalities; models that do not say so need all that they know."""

    def __init__(self, embed: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if not embed:
            raise ValueError(f"a model needs at least one modality of {', '.join(MODALITIES)}")
        self.embed = nn.ModuleDict({name: embed[name] for name in MODALITIES if name in embed})

    @property
    def modalities(self) -> tuple[str, ...]:
        """What the model reads, in the order of :data:`confed.federation.ownership.MODALITIES`."""
        return tuple(name for name in MODALITIES if name in self.embed)


class ModalTransformer(ModalNetwork):
    """Tokens of whatever modalities a batch has, a Transformer, and a linear readout."""

    answer_head = "head"
    """Name of the submodule that scores answers: what methods with a head of each client's own keep private."""

    def __init__(self, embed: Mapping[str, ModalEmbedding], body: Encoder, answers: int) -> None:
        super().__init__(embed)
        # Text comes last, so that with causal attention it sees what it is about and not the other way round.
        order = sorted(embed, key=lambda name: (name == "text", MODALITIES.index(name)))
        self.embed = nn.ModuleDict({name: embed[name] for name in order})
        self.body = body
        self.head = nn.Linear(body.width, answers)
        self.lam = 0.0  # share lambda of the local maps; 0 before there are any

    @property
    def frozen(self) -> set[str]:
        """Names of the parameters that do not learn, and of fixed modality vectors."""
        learning = {name: parameter.requires_grad for name, parameter in self.named_parameters()}
        # A method may add modules beside these, whose buffers are its own affair.
        fixed = {name for name in self.state_dict() if name.startswith("embed.") and name not in learning}
        return fixed | {name for name, learns in learning.items() if not learns}

    def places(self) -> Places:
        """What can be finetuned: adapters are after the residual sum of every layer of the body.

        Everything of a modality always learns, as the head does: it belongs to the data, and no body brings it along.
        """
        last = f"body.layers.{len(self.body.layers) - 1}."
        return Places(
            heads=("head", "embed"),
            top=(last, "body.norm."),
            hosts=[Host(layer, self.body.width) for layer in self.body.layers],
            reduction=8,
            lora=("attention.qkv",),
        )

    def personalise_maps(self, lam: float) -> None:
        """Gives every modality a local map, with the values of the shared one: M = lam M_loc + (1 - lam) M_up."""
        check_value(lam, Annotated[float, SHARE], "lam")
        self.lam = lam
        for module in self.embed.values():
            embedding = cast(ModalEmbedding, module)
            if embedding.local is not None:
                raise ValueError("the maps are personalised already")
            embedding.local, embedding.lam = copy.deepcopy(embedding.shared), lam

    def tokens(self, batch: Batch) -> Tokens:
        """The tokens of a batch's modalities: image, audio, series, then text."""
        return in_sequence(read(self.embed, batch))

    def encode(self, batch: Batch, causal: bool = False) -> Tokens:
        """The last states of all tokens."""
        tokens = self.tokens(batch)
        return tokens._replace(states=self.body(tokens.states, tokens.present, causal))

    def forward(self, batch: Batch) -> Output:
        """Scores of the answers (B, C), and the pooled states (B, d_model).

        ``image`` (B, 3, H, W); ``text`` and ``text_mask`` (B, L); ``audio`` (B, T) with ``audio_length`` (B,);
        ``series`` (B, S, K) with ``series_length`` (B,): those that are there.
        """
        features = pool(self.encode(batch))
        return Output(self.head(features), features)


def in_sequence(parts: Mapping[str, tuple[Tensor, Tensor | None]]) -> Tokens:
    """Named sequences, and which of their tokens are no padding, one behind the other."""
    spans: dict[str, slice] = {}
    start = 0
    for name, (states, _) in parts.items():
        spans[name] = slice(start, start := start + states.shape[1])
    return Tokens(*joined(list(parts.values())), spans)


def pool(tokens: Tokens) -> Tensor:
    """The mean over the modalities of the mean of each one's tokens, (B, d_model); padding does not count."""
    means: list[Tensor] = []
    for span in tokens.spans.values():
        states = tokens.states[:, span]
        if tokens.present is None:
            means.append(states.mean(1))
        else:
            counted = tokens.present[:, span].to(states.dtype)
            weights = counted / counted.sum(1, keepdim=True)
            means.append((weights.unsqueeze(1) @ states).squeeze(1))
    return torch.stack(means).mean(0)


def read(embed: nn.ModuleDict, batch: Batch) -> dict[str, tuple[Tensor, Tensor | None]]:
    """What a model's modules make of the modalities that a batch has, in the modules' order."""
    embedded = {name: module(batch) for name, module in embed.items() if name in batch}
    if not embedded:
        came = ", ".join(sorted(batch)) or "none"
        raise ValueError(f"a batch must have at least one of {', '.join(embed)}, got {came}")
    sizes = {name: len(states) for name, (states, _) in embedded.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"all modalities of a batch must have as many examples, got {sizes}")
    return embedded


def joined(parts: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Several sequences as one, (B, S, d), and which are no padding, bool (B, S); None where none is."""
    states = torch.cat([x for x, _ in parts], 1)
    if all(present is None for _, present in parts):
        return states, None
    return states, torch.cat(
        [x.new_ones(x.shape[:2], dtype=torch.bool) if present is None else present for x, present in parts], 1
    )


# Three sizes ----------------------------------------------------------------------------------------------------

Sound = Literal["log_mel", "waveform"]
"""What a segment of a sound is: frames of its log-mel spectrogram, or a piece of the waveform, as the paper has it."""
WordVectors = Literal["learned", "frozen"]  # a table of word vectors that learns, or one of fixed random vectors
WINDOW = 0.032  # seconds of a frame of the spectrogram


def segmenter(
    modality: str,
    vocab_size: int,
    *,
    picture_size: tuple[int, int] = (28, 28),
    patch: int | None = None,
    word_width: COUNT = 64,
    word_vectors: WordVectors = "learned",
    max_length: COUNT = 16,
    sample_rate: COUNT = 8000,
    sound: Sound = "log_mel",
    audio_seconds: float = 2.0,
    mels: COUNT = 32,
    stack: COUNT = 4,
    series_channels: int = 0,
    series_steps: COUNT = 256,
    window: COUNT = 8,
) -> Segmenter:
    """What cuts samples of one modality.

    Options:
        picture_size: (H, W) in pixels; a run takes it from the data.
        patch: pixels per side of a patch; None for the largest that gives 16 patches or more.
        word_width: features of a word vector; the paper does not say how many.
        word_vectors: "learned", or "frozen" random ones.
        max_length: the most tokens of a text; longer ones lose their end.
        sample_rate: of sounds; a run takes it from the data.
        sound: "log_mel", or "waveform" as in the paper.
        audio_seconds: the longest sound.
        mels: bands of the spectrogram.
        stack: its frames per segment, each 16 ms after the last; a piece of the waveform is as long.
        series_channels: values of a series per step; a run takes it from the data.
        series_steps: the longest series.
        window: steps of its segments.
    """
    if modality == "image":
        return Patches(picture_size, patch_side(picture_size) if patch is None else patch)
    if modality == "text":
        return Words(vocab_size, word_width, max_length, word_vectors == "learned")
    if modality == "series":
        return SeriesWindows(series_channels, window, series_steps)
    longest, frame = round(audio_seconds * sample_rate), 2 * round(WINDOW * sample_rate / 2)
    if sound == "waveform":
        return WaveFrames(stack * frame // 2, longest)
    return LogMelFrames(sample_rate, mels, frame, stack, longest)


def modal_parts(
    names: Sequence[str],
    vocab_size: int,
    pictures: Segmenter | None = None,
    *,
    width: COUNT = 64,
    vector_width: int = 8,
    vector: Vector = "learned",
    positions: bool = True,
    layers: COUNT = 2,
    attention_heads: int = 4,
    hidden: COUNT = 128,
    block: Block = "magneto",
    magneto_init: MagnetoInit = "torchscale",
    dropout: float = 0.0,
    **cuts: Any,
) -> tuple[dict[str, ModalEmbedding], Encoder]:
    """Embeddings of each modality, and the Transformer over all of them.

    Options:
        width: features of a token, d_model.
        vector_width: of which the modality vector has d_v, and a mapped segment the rest.
        vector: learned modality vectors, or fixed ones with a 1 at the modality's place.
        positions: learned positions are added to mapped segments.
        layers: of the Transformer.
        block: "magneto", or "prenorm" for ordinary layers.
        magneto_init: initial values of Magneto as released or as in its paper.
    """
    body = Encoder(width, layers, attention_heads, hidden, dropout, block=block, magneto_init=magneto_init)

    def embed(name: str) -> ModalEmbedding:
        cut = pictures if pictures is not None and name == "image" else segmenter(name, vocab_size, **cuts)
        return ModalEmbedding(name, cut, width - vector_width, vector_width, vector=vector, positions=positions)

    return {name: embed(name) for name in names}, body


def modal_options() -> None:
    """Options of models of several modalities.

    Options:
        modalities: what it reads, of "image", "text", "audio", "series".
        width: features of a token.
        attention_heads: of each layer; must divide the width.
        hidden: width of the feed-forward blocks.
        dropout: dropout probability.
        pretrained: CLIP's image encoder, a folder written by ``save_pretrained`` or a hub name such as
            ``"openai/clip-vit-large-patch14"``; its configuration then decides its sizes. None: random weights.
        seed: of the initial values.
    """


def picture_tokens(
    modalities: Sequence[str], clip: bool, pretrained: Path | str | None, seed: int, vision: str = ""
) -> Segmenter | None:
    """What cuts pictures in place of patches: an encoder by name, or CLIP ViT-L/14 where that is wanted."""
    if "image" not in modalities:
        return None
    if vision:
        return EncoderCells(vision)
    return ClipPatches(clip_encoder(pretrained, seed)) if clip else None


def assemble(
    answers: Sequence[str] | int,
    vocab_size: int,
    *,
    modalities: tuple[str, ...] = ("image", "text", "audio"),
    clip: bool = False,
    vision: str = "",
    pretrained: Path | str | None = None,
    vocabulary: Path | str | None = None,
    seed: int = 0,
    **parts: Any,
) -> ModalTransformer:
    """A model with its initial values.

    Options:
        vision: picture encoder, frozen: a name on the hub, a folder in the layout of ``transformers``, or "tiny:" and a
            family.
        vocabulary: BERT's ``vocab.txt``, a folder, or a hub name, for the tokenizer; None: the dataset's words.
        trainable: what of the Transformer learns beside the head and everything of each modality, which always do.
        peft: how, where a few parameters are added.
    """
    del vocabulary  # the tokenizer's
    names = checked_modalities(modalities)
    pictures = picture_tokens(modalities, clip, pretrained, seed, vision)
    return seeded(seed, lambda: ModalTransformer(*modal_parts(names, vocab_size, pictures, **parts), count(answers)))


def _tokenizer(
    words: Sequence[str], vocabulary: Path | str | None = None, max_length: int = 64
) -> BertTokenizer | WordTokenizer:
    """BERT's tokenizer where there is a vocabulary, else one of the dataset's words."""
    return caption_tokenizer(words, max_length) if vocabulary is None else bert_tokenizer(vocabulary, max_length)


def caption_tokenizer(words: Sequence[str], max_length: int = 16) -> WordTokenizer:
    """A tokenizer of the dataset's words; of any, where there is nothing to read."""
    return WordTokenizer(words or ("nothing",), max_length)


SOURCES = (modal_parts, segmenter, modal_options)

modal_transformer_tiny = variant(
    assemble, "modal_transformer_tiny",
    "A multimodal Transformer of a few thousand parameters, for tests: one layer, d_model = 16 of which d_v = 4.",
    "answers vocab_size modalities picture_size sample_rate series_channels max_length vector block dropout trainable "
    "peft seed",
    sources=SOURCES, spec=ModelSpec(tokenizer=caption_tokenizer),
    word_width=16, mels=8, layers=1, attention_heads=2, hidden=32, width=16, vector_width=4,
)  # fmt: skip
modal_transformer_mini = variant(
    assemble, "modal_transformer_mini",
    "A multimodal Transformer for small pictures, short sounds and short texts, made for one CPU core.",
    "answers vocab_size modalities picture_size sample_rate series_channels patch word_width word_vectors max_length "
    "sound audio_seconds mels stack series_steps window width vector_width vector positions layers attention_heads "
    "hidden block magneto_init dropout trainable peft seed",
    sources=SOURCES, spec=ModelSpec(tokenizer=caption_tokenizer),
)  # fmt: skip
modal_transformer_photos = variant(
    assemble, "modal_transformer_photos",
    "A small multimodal Transformer that reads pictures as the cells of a published picture encoder, computed once.",
    "answers vocab_size vision modalities sample_rate series_channels word_width word_vectors max_length sound "
    "audio_seconds mels stack series_steps window width vector_width vector positions layers attention_heads hidden "
    "block magneto_init dropout trainable peft seed",
    sources=SOURCES,
    spec=ModelSpec(
        tokenizer=caption_tokenizer, picture_side=lambda model: picture_side(encoder_source(model)),
        picture_fit=lambda model: picture_fit(encoder_source(model)),
    ),
    vision="google/mobilenet_v2_1.0_224",
)  # fmt: skip
modal_transformer = variant(
    assemble, "modal_transformer",
    "The paper's size: 12 Magneto layers, d_model = 2,048, 16 heads, feed-forward 4,096, pictures by CLIP ViT-L/14.\n\n"
    "The paper has pictures and texts; its texts are cut by SentencePiece.",
    "answers vocab_size pretrained modalities sample_rate series_channels vocabulary word_width word_vectors "
    "max_length sound audio_seconds mels stack series_steps window vector_width vector positions block magneto_init "
    "dropout trainable peft seed",
    sources=SOURCES, spec=ModelSpec(tokenizer=_tokenizer), clip=True, modalities=("image", "text"), sample_rate=16000,
    word_width=1024, max_length=64, sound="waveform", audio_seconds=10.0, mels=80, series_steps=1024, window=16,
    width=2048, vector_width=64, layers=12, attention_heads=16, hidden=4096, dropout=0.1,
)  # fmt: skip
