"""The trees of prefixes that PAT and FastTree publish: nodes and tokens of a node by level, and pairs of heads.

PAT (arXiv 2511.22333): benchmark/run_kernel_bench.sh of github.com/flashserve/PAT, commit fdd6176.
FastTree (MLSys 2025): kernel_bench/run_benchmark.sh of github.com/PanZaifeng/FastTree-Artifact, commit 6e5db75; there
in float16. Each leaf is the KV of one sequence, and the nodes of a level have equal numbers of children.
"""

from __future__ import annotations

from dataclasses import dataclass

from support.decode_cases import L2

PAT = [
    "1,10_4096,416",
    "1,256_256,32",
    "1,1024_2048,32",
    "1,2,64_1024,256,256",
    "1,4,256_32,256,32",
    "1,8,512_32,512,256",
    "1,8,512_32,2048,256",
    "1,8,512_512,512,256",
    "1,4,8,256_32,256,256,32",
    "1,4,16,512_1024,256,128,32",
    "1,4,16,64,256,1024_256,32,256,64,32,256",
    "1,16,32,64,128,1024_256,128,64,32,32,32",
    "1,16,32,64,256,1024_256,128,64,32,32,32",
    "1,8,16,32,64,128,1024_256,128,64,32,32,32,32",
    "1,8,16,32,64,256,1024_256,128,64,32,32,32,32",
    "2,8,16,256_256,256,32,32",
    "4,16,256,512_512,32,128,32",
    "8,16,32,256_512,512,256,32",
    "256_1024",
    "256_4096",
]
FAST_TREE = [
    "1,2,64_8,256,32",
    "1,4,256_8,256,32",
    "1,4,8,256_8,256,256,32",
    "1,256_256,32",
    "1,1024_2048,32",
    "1,16,64_1024,256,32",
    "1,4,16,512_1024,256,128,32",
    "1,4,16,64,256,1024_256,8,256,64,32,256",
    "1,10_4000,400",
    "1,2,4,8,16,32,64,128,1024_16,16,16,16,16,16,16,16,16",
    "1,2,4,8,16,32,64,128,1024_256,128,64,16,16,16,16,16,16",
    "1,8,16,32,64,128,1024_256,128,64,16,16,16,16",
    "1,8,16,32,64,256,1024_256,128,64,16,16,16,16",
    "1,16,32,64,128,1024_256,128,64,16,16,16",
    "1,16,32,64,256,1024_256,128,64,16,16,16",
]
TINY = ["1,4_64,16", "1,2,8_24,16,8", "6_40"]
PUBLISHED = {
    "cuda": {
        "pat": (PAT, [(32, 32), (16, 8), (32, 8), (64, 8)]),
        "fasttree": (FAST_TREE, [(16, 1), (32, 8), (32, 32)]),
    },
    "cpu": {"pat": (TINY, [(4, 4), (8, 2)]), "fasttree": (TINY[:1], [(4, 1)])},
}


@dataclass(frozen=True)
class Tree:
    """A tree of prefixes with one query for each leaf; keys and values are bfloat16."""

    source: str
    nodes: tuple[int, ...]  # by level
    lengths: tuple[int, ...]  # of the node of each level
    q_heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def name(self) -> str:
        return "_".join(",".join(map(str, x)) for x in (self.nodes, self.lengths))

    @property
    def batch(self) -> int:
        return self.nodes[-1]

    @property
    def levels(self) -> int:
        return len(self.nodes)

    @property
    def tokens(self) -> int:
        """Tokens of which the tree stores keys and values."""
        return sum(n * length for n, length in zip(self.nodes, self.lengths, strict=True))

    @property
    def kv_bytes(self) -> int:
        return 4 * self.tokens * self.kv_heads * self.head_dim

    @property
    def bytes(self) -> int:
        """The bytes of keys, values and queries in, and outputs out."""
        return self.kv_bytes + 4 * self.batch * self.q_heads * self.head_dim

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.q_heads * self.head_dim * sum(self.lengths)

    def copies(self, device: str) -> int:
        """Return the number of copies that together exceed the L2."""
        return min(12, -(-L2[device] // self.kv_bytes))


def trees(source: str, device: str) -> list[Tree]:
    published, heads = PUBLISHED[device][source]
    published_trees = []
    for q_heads, kv_heads in heads:
        for name in published:
            nodes, lengths = (tuple(map(int, x.split(","))) for x in name.split("_"))
            published_trees.append(Tree(source, nodes, lengths, q_heads, kv_heads))
    return published_trees
