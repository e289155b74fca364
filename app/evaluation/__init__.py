"""`penstock eval`: what a model knows, by tasks of lm-evaluation-harness and by needles in haystacks.

All of it queries a model through `queried.QueriedModel`: log-likelihoods and continuations, by streamed weights.
`harness` is what the harness sees of it, `needles` the built-in task, `report` what people get.
"""
