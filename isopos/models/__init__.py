"""Small models that read top to bottom, for comparisons and as examples."""

from isopos.deprecation import renamed
from isopos.models.blocks import TOKEN_STD, Block, Trunk
from isopos.models.decoder import AdaptiveHead, Decoder, DecoderState
from isopos.models.encoder import Classifier, Encoder, PairClassifier
from isopos.models.forecaster import Forecaster
from isopos.models.layers import PerLayer
from isopos.models.seq2seq import Seq2Seq
from isopos.models.vision import Vision

__all__ = ["TOKEN_STD", "AdaptiveHead", "Block", "Classifier", "Decoder", "DecoderState", "Encoder"]
__all__ += ["Forecaster", "PairClassifier", "PerLayer", "Seq2Seq", "Trunk", "Vision"]

__getattr__ = renamed(__name__, {"Stream": "isopos.models.decoder.DecoderState"})
