import torch

from polyrhythm.api.augment import contact_sheet
from polyrhythm.augmentation.tones import Tones


def test_pictures_lie_in_rows_with_paper_between_them():
    pictures = torch.tensor([[-1.0, 0.0, 1.0], [1.0, 0.0, 5.0]]).view(2, 3, 1, 1, 1).expand(2, 3, 1, 96, 100)
    sheet = contact_sheet(pictures, Tones((-1.0,), (1.0,)))
    assert sheet.shape == (2 * (96 + 8), 3 * (100 + 8), 3)
    middles = sheet[52::104, 54::108]
    assert middles[..., 0].tolist() == [[0, 128, 255], [255, 128, 255]]  # what is lighter than white is white
    assert torch.equal(middles, middles[..., :1].expand(-1, -1, 3))
    assert (sheet[:4] == 255).all()


def test_small_pictures_are_enlarged_by_a_whole_factor():
    picture = torch.eye(28).view(1, 1, 1, 28, 28)
    sheet = contact_sheet(picture, Tones((0.0,), (1.0,)))
    assert sheet.shape == (28 * 4 + 8, 28 * 4 + 8, 3)
    assert torch.equal(
        sheet[4:-4, 4:-4, 0], torch.eye(28).repeat_interleave(4, 0).repeat_interleave(4, 1).byte() * 255
    )


def test_three_channels_stay_colors():
    picture = torch.tensor([1.0, 0.5, 0.0]).view(1, 1, 3, 1, 1).expand(1, 1, 3, 96, 96)
    assert contact_sheet(picture, Tones((0.0,), (1.0,)))[50, 50].tolist() == [255, 128, 0]
