"""Recipes of language models."""

from isopos.lab.tasks.task import Recipe


def quickstart(scale: str) -> Recipe:
    """A byte-level model of the Python language reference, or of your text; a minute on 2 cores."""
    small = Recipe().edit(device="auto")
    tiny = small.edit(steps=50, length=64, layers=1, model_dim=32, heads=2)
    paper = small.edit(steps=5000, length=512, batch=32, layers=6, model_dim=512, heads=8, validate_every=500)
    return {"tiny": tiny, "small": small, "paper": paper}[scale]


def lrpe_alm(scale: str) -> Recipe:
    """LRPE's autoregressive language model (Table 8, column ALM; section 4): WikiText-103, 50,000 updates of 128 windows.

    The paper uses Fairseq's Adam, whose weight decay is decoupled: AdamW here. It does not state its dropout; 0.1 is in
    Fairseq's command for this text, whose other numbers are the paper's, and which ties embeddings and logits. The 267,744
    tokens are the words of WikiText-103. Logits take 0.5 GB per window: with fewer than 32 devices increase `accumulate`.
    Attention dropout, "only used for vanilla attention", is not stated either: 0, as in Fairseq.
    """
    paper = Recipe().edit(
        scheme="lrpe-orthogonal",
        data="hf:Salesforce/wikitext:wikitext-103-v1",
        tokenizer="words",
        steps=50_000,
        length=512,
        batch=128,
        layers=6,
        model_dim=512,
        heads=8,
        hidden_dim=2048,
        dropout=0.1,
        tied=True,
        learning_rate=5e-4,
        schedule="inverse-sqrt",
        warmup=4000,
        beta2=0.98,
        clip=0.0,
        validation_tokens=0,
        validate_every=1000,
        save_every=1000,
        device="auto",
    )
    return _scaled(paper, scale)


def permuteformer_lm(scale: str) -> Recipe:
    """PermuteFormer's language model (section 4.2.1): WikiText-103, 6 layers of 512, feed-forward 1024, 8 heads, length 512.

    The scheme itself has r in [0.88, 0.99], ReLU features and wider queries and keys (`width=4`, section 4.1). The paper
    leaves the rest (updates, windows, learning rate, optimizer, dropout) to Fairseq; it is as in `lrpe_alm`.
    """
    paper = lrpe_alm("paper").edit(scheme="permuteformer:width=4", hidden_dim=1024)
    return _scaled(paper, scale)


def _scaled(paper: Recipe, scale: str) -> Recipe:
    """The recipe at sizes for one GPU (small), or for two CPU cores and the reference text (tiny)."""
    hidden = paper.model.hidden_dim
    small = paper.edit(layers=4, model_dim=256, hidden_dim=hidden // 2, heads=4, length=256, batch=32)
    small = small.edit(accumulate=4, steps=10_000, warmup=1000, validation_tokens=100_000)
    tiny = small.edit(layers=2, model_dim=64, hidden_dim=hidden // 8, heads=4, length=64, batch=8, accumulate=1)
    tiny = tiny.edit(data="", steps=100, warmup=10, learning_rate=3e-3, validation_tokens=4096)
    return {"tiny": tiny.edit(validate_every=50, save_every=50), "small": small, "paper": paper}[scale]
