"""The EAGLE-3 drafter: config, model, training-time-test attention, initialisation, checkpoints."""
