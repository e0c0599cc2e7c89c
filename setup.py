import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    text = (ROOT / "dsv32_ops" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("dsv32_ops/version.py holds no __version__")
    return found[1]


def long_description() -> str:
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setup(
    name="dsv32-ops",
    version=version(),
    description="Fused PyTorch ops of DeepSeek-V3.2 inference, without a limit at 65,535 tokens",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["csrc_free_ops*", "dsv32_ops*"]),
    python_requires=">=3.10",
    install_requires=["torch>=2.11", 'triton>=3.6; platform_system == "Linux"'],
    extras_require={
        "test": ["pytest", "hypothesis", "numpy", "packaging"],
        "bench": ["rich", "matplotlib", "packaging"],
        "lint": ["ruff", "mypy"],
    },
    entry_points={
        "console_scripts": ["dsv32-ops = dsv32_ops.__main__:main"],
        "vllm.general_plugins": ["dsv32_ops = dsv32_ops.integrations.vllm:register"],
    },
    classifiers=[
        "Programming Language :: Python :: 3 :: Only",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
