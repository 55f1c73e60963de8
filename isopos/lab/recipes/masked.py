"""Recipes of masked language models, and of fine-tuning them."""

from dataclasses import replace

from isopos.lab.tasks.glue import Glue
from isopos.lab.tasks.masked import Masked
from isopos.lab.tasks.task import Recipe


def lrpe_blm(scale: str) -> Recipe:
    """LRPE's bidirectional language model (Table 8, column BLM): RoBERTa's architecture, 23,000 updates of 512 windows.

    The paper's text, WikiBook (Wikipedia and books, 22 GB, Wettig et al. 2022), is not distributed: WikiText-103 here, or
    another by --data. The 50,264 pieces and the mask are its vocabulary of 50,265. Its windows of "51" are read as 512. It
    states neither dropout, share of masked tokens nor tied embeddings; here RoBERTa's: 0.1, 15%, tied. Wettig et al. mask
    40% (--mask-share 0.4). It uses Fairseq's Adam, whose weight decay is decoupled: AdamW here.
    """
    paper = Recipe(task=Masked()).edit(
        scheme="lrpe-orthogonal",
        data="hf:Salesforce/wikitext:wikitext-103-raw-v1",
        tokenizer="bpe",
        vocabulary=50264,
        tied=True,
        steps=23_000,
        length=512,
        batch=512,
        layers=12,
        model_dim=768,
        heads=12,
        hidden_dim=3072,
        activation="gelu",
        dropout=0.1,
        learning_rate=5e-4,
        schedule="polynomial",
        warmup=3000,
        beta2=0.98,
        epsilon=1e-6,
        clip=0.0,
        validation_tokens=1_000_000,
        validate_every=1000,
        save_every=1000,
        device="auto",
    )
    small = paper.edit(layers=4, model_dim=256, hidden_dim=1024, heads=4, vocabulary=8192, length=256, batch=64)
    small = small.edit(steps=10_000, warmup=1000, validation_tokens=100_000)
    tiny = small.edit(layers=2, model_dim=64, hidden_dim=256, data="", tokenizer="bytes", vocabulary=0, length=64, batch=8)
    tiny = tiny.edit(steps=100, warmup=10, learning_rate=3e-3, validation_tokens=4096, validate_every=50, save_every=50)
    return {"tiny": tiny, "small": small, "paper": paper}[scale]


def lrpe_glue(scale: str) -> Recipe:
    """A task of GLUE, --data FOLDER, fine-tuned from the weights of the run lrpe-blm at the same scale.

    LRPE does not describe its fine-tuning. Here: RoBERTa's numbers (Liu et al. 2019, Table 10), 5000 updates for its 10
    epochs.
    """
    before = lrpe_blm(scale)
    paper = replace(before, task=Glue(start="runs/lrpe-blm", length=512)).edit(
        steps=5000, batch=16, learning_rate=2e-5, warmup=300, weight_decay=0.1, validate_every=500, save_every=500
    )
    small = paper.edit(length=256, steps=2000, batch=32, learning_rate=1e-4, warmup=200)
    tiny = paper.edit(length=128, steps=60, learning_rate=1e-3, warmup=6, validate_every=30, save_every=30)
    return {"tiny": tiny, "small": small, "paper": paper}[scale]
