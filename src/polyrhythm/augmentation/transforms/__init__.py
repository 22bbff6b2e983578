"""The augmentations, one a file; `polyrhythm.augmentation.chain` puts them after one another."""
