"""A custom feature map: softplus, log(1 + exp(x)), positive and smooth."""

from torch.nn import functional as F

from isopos.feature_maps import FeatureMap, register

softplus = register(FeatureMap("softplus", F.softplus))
