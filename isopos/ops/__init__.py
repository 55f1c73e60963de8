"""Operations on plain tensors: a readable naive definition beside each fast version."""
