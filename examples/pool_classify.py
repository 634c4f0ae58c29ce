"""Classify a folder of images: one subfolder for each class, read by a DataLoader.

python examples/pool_classify.py                          draws 600 images first
python examples/pool_classify.py --folder out/images --workers 2
DATAPARALLEL_VIRTUAL_DEVICES=4 python examples/pool_classify.py   # 4 accelerators in host memory
"""

import argparse
import pathlib

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dataparallel as dp

CLASSES, SIZE = ("columns", "rows", "squares"), 32


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images of binary PPM files, and the numbers of their classes."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.paths = sorted(folder.glob("*/*.ppm"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        header, pixels = path.read_bytes().split(b"\n255\n", 1)
        width, height = map(int, header.removeprefix(b"P6").split())
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(height, width, 3)
        return image.permute(2, 0, 1) / 255, CLASSES.index(path.parent.name)


def draw(folder: pathlib.Path, count: int) -> None:
    """Write noisy images of stripes and squares."""
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        name = CLASSES[number % 3]
        period = int(torch.randint(3, 8, (), generator=generator))
        is_odd = torch.arange(SIZE) // period % 2 == 1
        rows, columns = is_odd[:, None].expand(SIZE, SIZE), is_odd.expand(SIZE, SIZE)
        pattern = {"rows": rows, "columns": columns, "squares": rows ^ columns}[name]
        noise = torch.rand(SIZE, SIZE, 3, generator=generator)
        pixels = ((pattern[..., None] + noise) * 127).byte().flatten().tolist()
        (folder / name).mkdir(parents=True, exist_ok=True)
        path = folder / name / f"{number:05}.ppm"
        path.write_bytes(b"P6\n%d %d\n255\n" % (SIZE, SIZE) + bytes(pixels))


def main() -> None:
    options = parse_options()
    if not options.folder.exists():
        draw(options.folder, 600)
    images = ImageFolder(options.folder)
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(32, len(CLASSES))),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(3):
        for x, y in DataLoader(images, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    net.eval()

    devices = options.devices.split(",") if options.devices else dp.accelerators() or ["cpu", "cpu"]
    loader = DataLoader(images, batch_size=options.batch_size, num_workers=options.workers)
    labels = torch.tensor([CLASSES.index(path.parent.name) for path in images.paths])
    with dp.Pool(net, devices) as pool:
        logits = pool.predict((x for x, _ in loader), progress=options.progress)
    found = logits.argmax(1)
    for number, name in enumerate(CLASSES):
        print(f"{name}: {(found == number).sum()} images")
    right = (found == labels).float().mean()
    print(f"{right:.1%} of {len(images)} images are right, on: {', '.join(map(str, devices))}")

    with torch.inference_mode():
        bare = torch.cat([net.cpu()(x) for x, _ in loader])
    print(f"largest difference to the bare module: {(logits - bare).abs().max():.1e}")


def parse_options() -> argparse.Namespace:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--devices", help="one for each item at a time: cpu,cpu or cuda:0,cuda:1")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("out/images"))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0, help="processes that read images")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
