"""Test the models: decoder, encoder, classifiers."""

import copy
from functools import partial

import pytest
import torch
from cases import HEAD_DIM, HEADS, PRESETS, STEPS, TOLERANCE, close, each, ids, over_rows, perturb
from structures import over_covering

from isopos import Decoder, schemes
from isopos.models import Block, Classifier, Encoder, Vision, encoder
from isopos.models.blocks import NORMS
from isopos.positions import Line, grid, sequence

WIDTH, VOCABULARY, T = HEAD_DIM * HEADS, 11, 9
ON_GRIDS = [case for case in PRESETS if case.both_ways and case.group.is_grid and case.group.columns < 3]
presets = over_rows(PRESETS)


def made(case, **more):
    """A model with two layers for presets, and one layer for other structures."""
    return perturb(Decoder(VOCABULARY, WIDTH, 2 if case in PRESETS else 1, case.build(**more)))


def tokens(*shape):
    return torch.randint(VOCABULARY, shape)


@over_covering(lambda case, kind: isinstance(case.group, Line))
def test_shift_and_causality(case, kind):
    model, x = made(case, attention=kind), tokens(2, T)
    y = model(x)
    assert y.shape == (2, T, VOCABULARY)
    close(model(x, sequence(T).expand(2, T, 1)), y)
    shifted = model(x, sequence(T) + torch.tensor([50, 7])[:, None, None])
    if case.relative:
        close(shifted, y, roundings=1000 * TOLERANCE)
    else:
        assert (shifted - y).abs().max() > 1e-4
    assert torch.allclose(model(x, 2 * sequence(T)), y) == (case.name in ("none", *STEPS))
    later = x.clone()
    later[:, 5:] = (x[:, 5:] + 1) % VOCABULARY
    if case.clipped and kind == "linear":
        close(model(later)[:, :5], y[:, :5])  # a difference of prefix sums that hold later values, too
    else:
        assert torch.equal(model(later)[:, :5], y[:, :5])
    assert not torch.equal(model(later)[:, 5:], y[:, 5:])


@each("case", [case for case in PRESETS if not isinstance(case.group, Line)], ids=ids)
def test_other_positions_are_asked_for(case):
    """The default positions 0, 1, ... serve lines and rings only."""
    model, x, at = made(case), tokens(2, T), case.positions(2, t=T)
    y = model(x, at)
    assert y.shape == (2, T, VOCABULARY)
    assert not torch.allclose(model(x, case.positions(2, t=T)), y)
    if case.group.columns > 1:
        with pytest.raises(ValueError, match="positions: expected"):
            model(x)


@presets
def test_one_step_reaches_every_parameter(case):
    model, x = made(case), tokens(4, 4 * T)
    model(x, case.positions(4, t=4 * T)).square().mean().backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not silent


@presets
def test_bfloat16_by_autocast_and_by_conversion(case):
    model, x, at = Decoder(VOCABULARY, WIDTH, 2, case.build()), tokens(2, T), case.positions(2, t=T)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, at)
    y.float().square().mean().backward()
    exact = model(x, at)
    close(y, exact, dtype=torch.bfloat16, roundings=16)
    assert all(p.grad.isfinite().all() for p in model.parameters())
    y = model.bfloat16()(x, at)
    assert y.dtype == torch.bfloat16
    close(y, exact, roundings=16)


def test_the_scheme_is_evaluated_once_a_forward():
    scheme = schemes.rope(HEAD_DIM, HEADS)
    calls = []
    scheme.encoding.register_forward_hook(lambda *_: calls.append(1))
    Decoder(VOCABULARY, WIDTH, 3, scheme)(tokens(2, T))
    assert calls == [1]


def test_layers_and_widths():
    scheme = schemes.rope(HEAD_DIM, HEADS)
    model = Decoder(VOCABULARY, WIDTH, 3, scheme, dropout=0.5)
    assert len(model.blocks) == 3
    x = tokens(2, T)
    assert not torch.equal(model(x), model(x)), "dropout"
    assert torch.equal(model.eval()(x), copy.deepcopy(model)(x))
    assert Block(WIDTH, scheme, hidden_dim=5).feed_forward[0].out_features == 5
    assert Block(WIDTH, scheme).feed_forward[0].out_features == 4 * WIDTH


def test_learned_positions_end():
    model = Decoder(VOCABULARY, WIDTH, 1, schemes.learned(HEAD_DIM, HEADS, length=4))
    with pytest.raises(ValueError, match="expected 0 to 3"):
        model(tokens(1, 5))


@torch.no_grad()
@over_covering(lambda case, kind: isinstance(case.group, Line) and case.streams(kind))
def test_a_decoder_streams(case, kind):
    model, x = made(case, attention=kind).eval(), tokens(3, 8)
    whole = model(x)
    logits, stream = model.prefill(x[:, :5])
    close(logits, whole[:, :5])
    kept = stream
    for n in range(5, 8):
        last, stream = model.step(x[:, n], stream)
        close(last, whole[:, n])
    assert (kept.length, stream.length) == (5, 8)
    swapped, _ = model.step(x[[2, 0], 5], kept.reorder(torch.tensor([2, 0])))
    close(swapped, whole[[2, 0], 5])
    close(model.prefill(x[:, 5:], kept)[0], whole[:, 5:])


def adaptive(**more):
    model = Decoder(50, 16, 2, schemes.rope(8, 2), cutoffs=(5, 20), **more)
    return perturb(model), torch.randint(50, (3, T)), torch.randint(50, (3, T))


@each("scored", [1, 4, T])
@each("cutoffs", [(), (5,), (5, 20)])
def test_the_loss_is_that_of_the_last_logits(cutoffs, scored):
    model = perturb(Decoder(50, 16, 2, schemes.rope(8, 2), cutoffs=cutoffs))
    x, targets = torch.randint(50, (3, T)), torch.randint(50, (3, scored))
    expected = torch.nn.functional.cross_entropy(model(x)[:, T - scored :].flatten(0, 1), targets.flatten())
    close(model(x, targets=targets), expected)
    close(model.loss(model.advance(x)[0], targets), expected)


def test_an_adaptive_softmax_is_a_distribution_and_streams():
    model, x, _ = adaptive()
    logits = model(x)
    close(logits.exp().sum(-1), torch.ones(3, T))
    first, stream = model.prefill(x[:, :4])
    close(first, logits[:, :4])
    close(model.step(x[:, 4], stream)[0], logits[:, 4])


def test_an_adaptive_softmax_trains_every_parameter_also_in_bfloat16():
    model, x, targets = adaptive()
    targets.flatten()[:3] = torch.tensor([0, 10, 49])  # each cluster
    model(x, targets=targets).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    exact = model(x, targets=targets)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x, targets=targets).item() == pytest.approx(exact.item(), rel=0.02)


def test_impossible_cutoffs_are_refused():
    for cutoffs in ((0,), (5, 5), (20, 5), (50,)):
        with pytest.raises(ValueError, match="cutoffs: expected increasing numbers from 1 to 49"):
            Decoder(50, 16, 1, schemes.rope(8, 2), cutoffs=cutoffs)
    with pytest.raises(
        ValueError, match="cutoffs: expected at most 2 for a width of 16, which each cutoff divides by 4, got 3"
    ):
        Decoder(50, 16, 1, schemes.rope(8, 2), cutoffs=(5, 10, 20))


def test_a_tied_head_has_the_vectors_of_tokens():
    torch.manual_seed(0)
    tied = Decoder(50, 16, 2, schemes.rope(8, 2), tied=True)
    names = {name for name, _ in Decoder(50, 16, 2, schemes.rope(8, 2)).named_parameters()}
    assert names - {name for name, _ in tied.named_parameters()} == {"head.weight", "head.bias"}
    x, targets = torch.randint(50, (3, T)), torch.randint(50, (3, T))
    found = tied(x)
    close(found, tied.features(x, None, causal=True) @ tied.tokens.weight.mT)
    tied(x, targets=targets).backward()
    assert (tied.tokens.weight.grad.abs().sum(-1) > 0).all()  # of tokens that do not occur, by their logits
    copied = copy.deepcopy(tied)
    copied.load_state_dict(perturb(Decoder(50, 16, 2, schemes.rope(8, 2), tied=True)).state_dict())
    assert copied.head.weight is copied.tokens.weight
    assert not torch.allclose(copied(x), found)


def test_a_tied_head_is_refused_with_cutoffs():
    with pytest.raises(ValueError, match=r"tied: expected no cutoffs with a tied head, got \(5,\); choose one of the two"):
        Decoder(50, 16, 1, schemes.rope(8, 2), cutoffs=(5,), tied=True)


@each("name", ["none", "sinusoidal", "rope", "lrpe-orthogonal"])
def test_an_encoder_sees_both_sides_and_keeps_its_law(name):
    model, x = perturb(Encoder(VOCABULARY, WIDTH, 2, schemes.build(name, HEAD_DIM, HEADS, {}))), tokens(2, T)
    y = model(x)
    assert y.shape == (2, T, VOCABULARY)
    later = x.clone()
    later[:, -1] = (x[:, -1] + 1) % VOCABULARY
    assert ((model(later) - y).abs() > 1e-6).any(-1).all()
    shifted = model(x, sequence(T) + 50)
    assert torch.allclose(shifted, y, atol=1e-4) == (name != "sinusoidal")


@each("model", [Decoder, Encoder, lambda v, *rest: Classifier(v, 3, *rest)])
def test_an_embedding_of_another_width_is_refused(model):
    with pytest.raises(ValueError, match="model_dim: expected the 16 of the scheme's embedding, got 32"):
        model(50, 32, 1, schemes.build("sinusoidal", 8, 2, {}))


def padded(case, lengths):
    """Samples of several lengths as a batch: tokens, positions and mask. Their padding has the next positions, or roots."""
    longest = max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    x = tokens(len(lengths), longest)
    if not case.group.refers_to_rows:
        return x, case.positions(len(lengths), t=longest), mask
    at = case.group.origin(len(lengths), longest)
    for i, n in enumerate(lengths):
        at[i, :n] = case.positions(t=n)
    return x, at, mask


@over_covering(lambda case, kind: case.both_ways)
def test_padding_and_other_samples_change_nothing(case, kind):
    lengths, scheme = [5, 7, 1], case.build(attention=kind)
    x, at, mask = padded(case, lengths)
    changed = torch.where(mask, x, (x + 1) % VOCABULARY)
    classifier = [Classifier(VOCABULARY, 3, WIDTH, 2, scheme)] if case in PRESETS else []
    for model in (Encoder(VOCABULARY, WIDTH, 2, scheme), *classifier):
        perturb(model)
        batches = model(x, at, mask), model(changed, at, mask)
        for i, n in enumerate(lengths):
            alone = model(x[i : i + 1, :n], at[i : i + 1, :n])[0]
            for found in batches:
                close(found[i, :n] if isinstance(model, Encoder) else found[i], alone)


@each("kind", ["linear", "softmax"])
@each("name", ["rope", "ape-tree"])
def test_no_gradient_comes_from_padding(name, kind):
    (case,) = (case for case in PRESETS if case.id == name)
    model, lengths = perturb(Classifier(VOCABULARY, 3, WIDTH, 2, case.build(attention=kind))), [5, 9]
    x, at, mask = padded(case, lengths)
    x = torch.where(mask, x % (VOCABULARY - 1), VOCABULARY - 1)
    model(x, at, mask).square().sum().backward()
    padding = model.tokens.weight.grad[-1].clone()
    assert not padding.any()
    joint = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for i, n in enumerate(lengths):
        model(x[i : i + 1, :n], at[i : i + 1, :n]).square().sum().backward()
    for p, expected in zip(model.parameters(), joint, strict=True):
        close(p.grad, expected)


def test_a_classifier_drops_out_only_while_it_learns():
    model, x = Classifier(VOCABULARY, 3, WIDTH, 2, schemes.rope(HEAD_DIM, HEADS), dropout=0.5), tokens(2, T)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))
    assert model(x).shape == (2, 3)


@each("model", [Encoder, lambda v, *rest, **more: Classifier(v, 3, *rest, **more)])
def test_what_is_computed_again_is_the_same(model):
    case = next(case for case in PRESETS if case.id == "rope")
    x, at, mask = padded(case, [5, 9])
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(1)
        own = model(VOCABULARY, WIDTH, 2, case.build(), recompute=recompute, dropout=0.3)
        own(x, at, mask).square().sum().backward()
        gradients.append([p.grad for p in own.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_running_statistics_change_once_where_blocks_are_computed_again():
    models = [Encoder(VOCABULARY, 32, 2, schemes.rope(8, 4), norm="batch", recompute=again) for again in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model(torch.arange(14).view(2, 7) % VOCABULARY).square().mean().backward()
    assert int(models[1].blocks[0].norm1.num_batches_tracked) == 1
    assert all(torch.equal(a, b) for a, b in zip(models[0].buffers(), models[1].buffers(), strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@each("dtype", [torch.float16, torch.bfloat16])
def test_a_mean_with_a_full_mask_is_the_mean(dtype):
    x = torch.full((1, 16384, 4), 5.0, dtype=dtype)
    mean = encoder._pooled(x, torch.ones(1, 16384, dtype=torch.bool), "mean")
    assert mean.dtype == dtype
    assert torch.equal(mean, encoder._pooled(x, None, "mean"))


def test_the_first_token_is_the_first_one_that_is_kept():
    model = Classifier(VOCABULARY, 3, 32, 1, schemes.rope(8, 4), pooling="first").eval()
    mask = torch.tensor([[False, False, True, True, True, True]])
    x, other = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 3, 4, 5, 6]])[:, None].unbind(0)
    assert torch.equal(model(x, mask=mask), model(other, mask=mask))


def test_one_block_has_the_whole_stochastic_depth():
    assert Decoder(9, 32, 1, schemes.rope(8, 4), stochastic_depth=0.5).blocks[0].stochastic_depth == 0.5


def test_targets_of_another_batch_or_of_more_tokens_are_refused():
    model = Decoder(9, 32, 1, schemes.rope(8, 4))
    for shape in ((1, 18), (2, 12)):
        with pytest.raises(ValueError, match=r"targets: expected \[2 s\] of at most 9 tokens, got"):
            model(torch.zeros(2, 9, dtype=torch.int64), targets=torch.zeros(shape, dtype=torch.int64))


def test_an_adaptive_softmax_has_any_axes():
    head = Decoder(50, 16, 1, schemes.rope(8, 2), cutoffs=(5,)).head
    x = torch.randn(3, 4, 16)
    close(head(x[0, 0]), head(x)[0, 0])


def test_models_with_checks_of_positions_have_shapes_on_the_meta_device():
    decoder = Decoder(9, 32, 1, schemes.learned(8, 4, length=16)).to("meta")
    assert decoder(torch.zeros(2, 5, dtype=torch.int64, device="meta")).shape == (2, 5, 9)
    vision = Vision(3, 5, 32, 2, schemes.ape_grid(8, 4), patch=8).to("meta")
    assert vision(torch.zeros(1, 3, 16, 16, device="meta")).shape == (1, 5)


@each("make", [Decoder, Encoder, partial(Classifier, classes=3)])
def test_parameters_of_heads_come_before_those_of_schemes(make):
    """The saved state of an optimiser identifies parameters by their order."""
    model = make(vocabulary=20, model_dim=16, layers=1, scheme=schemes.rope(8, 2, learned=True))
    assert [name for name, _ in model.named_parameters()][-3:] == ["head.weight", "head.bias", "scheme.encoding.frequency"]


@each("kind", ["linear", "softmax"])
def test_models_have_fewer_heads_of_keys(kind):
    model = Decoder(50, 32, 2, schemes.alibi(8, 4, attention=kind), kv_heads=2).eval()
    assert model.blocks[0].attention.key.out_features == 16
    tokens = torch.randint(50, (2, 9))
    logits, stream = model.prefill(tokens[:, :5])
    for i in range(5, 9):
        logits, stream = model.step(tokens[:, i], stream)
    torch.testing.assert_close(logits, model(tokens)[:, -1], atol=1e-5, rtol=1e-4)


def test_a_model_with_windows_streams():
    model = Decoder(50, 32, 2, schemes.rope(8, 4, attention="softmax"), window=4, attention_dropout=0.1).eval()
    tokens = torch.randint(50, (2, 20))
    logits, stream = model.prefill(tokens[:, :5])
    for i in range(5, 20):
        logits, stream = model.step(tokens[:, i], stream)
        assert stream.states[0]["keys"].shape[-2] == 3
    torch.testing.assert_close(logits, model(tokens)[:, -1], atol=1e-5, rtol=1e-4)


def test_batch_norm_is_over_the_tokens_of_the_mask():
    norm, plain = NORMS["batch"](WIDTH), torch.nn.BatchNorm1d(WIDTH)
    x, mask = torch.randn(3, T, WIDTH), torch.arange(T) < torch.tensor([4, T, 1])[:, None]
    close(norm(x, mask)[mask], plain(x[mask]))
    close(norm.running_var, plain.running_var)
    assert not norm(x, mask)[~mask].any()
    close(norm(x), plain(x.flatten(0, 1)).view_as(x))
    with pytest.raises(ValueError, match="norm: expected layer in a decoder"):
        Decoder(VOCABULARY, WIDTH, 1, schemes.build("rope", HEAD_DIM, HEADS), norm="batch")


def test_a_padded_sample_equals_the_sample_alone_for_every_norm():
    x, mask = tokens(2, T), torch.arange(T) < torch.tensor([5, T])[:, None]
    for norm in ("layer", "batch"):
        scheme = schemes.build("rope", HEAD_DIM, HEADS)
        model = perturb(Classifier(VOCABULARY, 3, WIDTH, 2, scheme, norm=norm, activation="gelu")).eval()
        close(model(x, mask=mask)[0], model(x[:1, :5])[0])
        model.train()  # by the statistics of the batch itself, in which padding has no part
        close(model(torch.where(mask, x, (x + 1) % VOCABULARY), mask=mask), model(x, mask=mask))


def test_stochastic_depth_spares_samples_branches_and_keeps_their_mean():
    block = Block(WIDTH, schemes.build("rope", HEAD_DIM, HEADS), stochastic_depth=0.25)
    y = torch.ones(4000, 2, 3)
    kept = block.residual(y)
    assert {*kept.flatten().unique().tolist()} == {0.0, torch.tensor(4 / 3).item()}
    assert (kept == kept[:, :1, :1]).all()
    assert kept.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(block.eval().residual(y), y)
    trunk = Encoder(VOCABULARY, WIDTH, 3, schemes.build("rope", HEAD_DIM, HEADS), stochastic_depth=0.2)
    assert [one.stochastic_depth for one in trunk.blocks] == [0, 0.1, 0.2]
    for name, value in (("activation", "tanh"), ("norm", "group"), ("stochastic_depth", 1.0)):
        with pytest.raises(ValueError, match=f"{name}: expected"):
            Encoder(VOCABULARY, WIDTH, 2, schemes.build("rope", HEAD_DIM, HEADS), **{name: value})


@each("case", ON_GRIDS, ids=ids)
def test_images_have_positions_on_a_grid_or_in_a_line_and_of_any_size(case):
    model = perturb(Vision(3, 5, WIDTH, 2, case.build(), patch=2)).eval()
    for height, width in ((6, 4), (4, 8)):
        pixels = torch.randint(256, (2, 3, height, width), dtype=torch.uint8)
        flat = case.group.columns == 1
        at = sequence(height * width // 4) if flat else grid(height // 2, width // 2)
        at = torch.cat((case.group.origin(case.build().outside), at))[: len(at)]
        if case.build().outside:
            continue
        y = model(pixels)
        assert y.shape == (2, 5)
        assert torch.equal(model(pixels, at), y)
        if case.relative:
            close(model(pixels, at + 3), y, roundings=1000 * TOLERANCE)


def test_patches_are_linear_in_their_pixels_row_by_row():
    model = Vision(3, 5, WIDTH, 1, schemes.none(HEAD_DIM, HEADS), patch=2)
    pixels = torch.randint(256, (2, 3, 4, 6))
    weight = model.tokens.project.weight
    for n, (row, column) in enumerate(grid(2, 3).tolist()):
        patch = pixels[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] / 127.5 - 1
        close(model.tokens(pixels)[:, n], patch.flatten(1) @ weight.flatten(1).T + model.tokens.project.bias)
    with pytest.raises(ValueError, match="width: expected a multiple of the 2 pixels of a patch, got 5"):
        model(pixels[..., :5])


@each("side", [1, 2, 3, 4, 5])
def test_a_convolution_has_a_token_for_every_so_many_pixels_of_any_image(side):
    model = Vision(1, 5, WIDTH, 1, schemes.ape_grid(HEAD_DIM, HEADS), tokenizer="convolution", patch=side)
    tokens = model.tokens
    for height, width in ((7, 9), (8, 8), (1, 5)):
        pixels = torch.randint(256, (1, 1, height, width))
        rows, columns = tokens.sides(height, width)
        found = torch.nn.functional.relu(tokens.project(pixels / 127.5 - 1))
        reach = side // 2
        for n, (row, column) in enumerate(grid(rows, columns).tolist()):
            y, x = row * side, column * side
            around = found[0, :, max(0, y - reach) : y + reach + 1, max(0, x - reach) : x + reach + 1]
            close(tokens(pixels)[0, n], around.flatten(1).max(1).values)
        assert tokens(pixels).shape[1] == rows * columns
        assert model(pixels).shape == (1, 5)


def test_sequence_pooling_weighs_tokens_by_what_a_vector_finds_in_them():
    model = perturb(Vision(1, 5, WIDTH, 1, schemes.rope(HEAD_DIM, HEADS), patch=2, pooling="sequence"))
    pixels = torch.randint(256, (2, 1, 4, 4))
    x = model.features(pixels, sequence(4))
    weight = (x @ model.pool.weight[0] + model.pool.bias).softmax(-1)
    close(model(pixels), model.head(torch.einsum("bt,btm->bm", weight, x)))
    for wrong in ({"pooling": "max"}, {"tokenizer": "pixels"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected one of"):
            Vision(1, 5, WIDTH, 1, schemes.rope(HEAD_DIM, HEADS), **wrong)
