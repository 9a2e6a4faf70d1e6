"""Programs written for t5-experiments: its Trainer, arguments, helpers, BERT data; imports every room below.

Nothing here computes: each name translates to the room that does. The modules that such programs import (`utils`,
`trainer`, `trainer_accelerate` of this package, `megatron.data.*`, `megatron.tokenizer.*`) hold the names alone.
docs/porting.md lists them beside today's.
"""
