"""Models: built by name, loaded pre-trained, adapted, frozen, placed; imports checkpoint, data, attention, modules."""
