"""Rows times a matrix that was brought into the kernel's order beforehand: the costly half of coding.

Owns: in which dtype a machine multiplies, the number of rows of every product, memory for them, and `Product`.

Shapes: R rows of a tile, at most `TILE_ROWS`; I inputs, N outputs.

In bfloat16 terms are added in float32 and each sum is rounded to bfloat16. Given plain tensors, oneDNN rearranges the matrix
at every product, for a tile up to half of its time; `Product` has it done once, through the operators that PyTorch's own
compiler emits. Where a build or a CPU lacks them, rows are rounded to the dtype that was asked for as well, and products run
in float32, on a copy of the matrix that is made once.

How a product adds up depends on its number of rows. `Product` always multiplies `TILE_ROWS`, the last ones zeros: **the bits
of a row do not depend on what other rows there are**, on one machine with one number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scd_trt.translator import MATRIX_DTYPE

TILE_ROWS = 128
"""Their float32 features fit into the cache of a core. Twice as many would multiply a fifth faster, but a block of 32 tokens,
encoded alone, is filled up to a tile."""

_INPUT_MULTIPLE = 32
"""Inputs that one bfloat16 instruction takes. With other numbers of inputs products take up to twice as long."""


def product_dtype() -> torch.dtype:
    """Dtype in which this machine multiplies: the matrices' own where it has instructions for that, else float32."""
    return MATRIX_DTYPE if torch.cpu._is_avx512_bf16_supported() and _has_packed_products() else torch.float32


class Scratch:
    """Memory of a tile, used again for each: pages fresh from the system cost several times what is computed in them.

    Whoever shares one works in one thread, and names what lives at the same time differently.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def rows(self, name: str, num_columns: int, dtype: torch.dtype) -> Tensor:
        """`[TILE_ROWS, num_columns]`: what was left there, zeros at first."""
        key = (name, num_columns, dtype)
        found = self._held.get(key)
        if found is None:
            # made in inference mode, it could be written in no other
            with torch.inference_mode(mode=False):
                found = self._held[key] = torch.zeros(TILE_ROWS, num_columns, dtype=dtype)
        return found


class Product:
    """Multiplies tiles by one matrix.

    Args:
        matrix_IN: of any float dtype.
        dtype: to which rows, matrix and sums are rounded.
        scratch: where operands and results are put.
        num_fine: of so many first outputs what rounding the sum has dropped is computed, too, and added.
    """

    def __init__(self, matrix_IN: Tensor, *, dtype: torch.dtype, scratch: Scratch, num_fine: int = 0) -> None:
        self.dtype, self._scratch, self._num_fine = dtype, scratch, num_fine
        self._num_inputs, self._num_outputs = matrix_IN.shape
        # the kernel takes no empty matrix
        self._is_packed = dtype == torch.bfloat16 and matrix_IN.numel() > 0 and _has_packed_products()
        self._matrix = _packed(matrix_IN) if self._is_packed else _float32(matrix_IN.to(dtype))
        self._fine = _packed(matrix_IN[:, :num_fine]) if self._is_packed and num_fine else None

    def operand(self, rows_RI: Tensor) -> Tensor:
        """Those rows as a whole tile in the dtype of products; products of as many inputs can share it until the next one."""
        num_columns = _padded(self._num_inputs)
        # columns past the inputs are never written
        operand = self._scratch.rows(f"operand of {self._num_inputs}", num_columns, self.dtype)
        operand[: len(rows_RI), : self._num_inputs] = rows_RI
        operand[len(rows_RI) :].zero_()
        return operand

    def __call__(self, operand: Tensor) -> Tensor:
        """Float32 `[TILE_ROWS, N]`, the caller's until the next product of as many outputs."""
        product = self._scratch.rows("product", self._num_outputs, torch.float32)
        if not self._is_packed:
            return torch.mm(operand.float(), self._matrix, out=product)
        rounded = _packed_product(operand, self._matrix)
        product.copy_(rounded)
        if self._fine is not None:
            # a tensor that is added to a product is added before the sum is rounded
            product[:, : self._num_fine] += _packed_product(operand, self._fine, -rounded[:, : self._num_fine])
        return product


def _padded(num_inputs: int) -> int:
    return -(-num_inputs // _INPUT_MULTIPLE) * _INPUT_MULTIPLE


def _float32(matrix_IN: Tensor) -> Tensor:
    return torch.nn.functional.pad(matrix_IN.float(), (0, 0, 0, _padded(len(matrix_IN)) - len(matrix_IN)))


def _has_packed_products() -> bool:
    operators = torch.ops.mkldnn
    names = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    return all(hasattr(operators, name) for name in names) and bool(operators._is_mkldnn_bf16_supported())


def _packed(matrix_IN: Tensor) -> Tensor:
    """The matrix in the order in which the kernel reads it."""
    num_inputs, num_outputs = matrix_IN.shape
    weight_NI = torch.zeros(num_outputs, _padded(num_inputs), dtype=torch.bfloat16)
    weight_NI[:, :num_inputs] = matrix_IN.T
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NI, TILE_ROWS)
    return packed


def _packed_product(operand: Tensor, packed: Tensor, addend: Tensor | None = None) -> Tensor:
    linear = torch.ops.mkldnn._linear_pointwise
    product: Tensor = (
        linear(operand, packed, None, "none", [], "")
        if addend is None
        else linear.binary(operand, addend, packed, None, "add")
    )
    return product
