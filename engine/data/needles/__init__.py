"""Tasks of retrieval: haystacks of ids to train on, needles hidden in text to evaluate with."""
