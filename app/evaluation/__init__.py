"""`penstock eval`: what a model knows, by tasks of lm-evaluation-harness and by needles in haystacks.

All of it asks a model through `asked.Asked`: log-likelihoods and continuations, by streamed weights. `harness` is what
the harness sees of it, `needles` the built-in task, `report` what people get.
"""
