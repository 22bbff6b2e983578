"""The augmentations, one per module; `polyrhythm.augmentation.chain` applies them in order."""
