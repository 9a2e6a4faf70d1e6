"""Compatibility with t5-experiments: its Trainer, arguments, helpers and BERT data.

Each name forwards to the current package. The modules that such programs import (`utils`, `trainer` and
`trainer_accelerate` of this package, `megatron.data.*`, `megatron.tokenizer.*`) only re-export the names.
docs/porting.md lists old and new names.
"""
