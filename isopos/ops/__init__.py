"""Operations on plain tensors: a readable naive definition and a fast version of each."""
