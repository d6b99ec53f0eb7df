"""SPIR-V assembly -> SPIR-V: the words of a module.

In: the text that `emitter` writes, in the syntax of `spirv-as`. Out: the module's bytes. `OPCODES` and `NAMES` hold what our emitter says and no
more; numbers are those of the SPIR-V specification and its two sets of functions. An instruction is its length and number, then its type and
result where it has them, then its operands, each a word, but for texts and 64-bit numbers.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping

from tilewright.base.errors import CompilerBug

MAGIC = 0x07230203
_UNTYPED = frozenset({"OpLabel", "OpExtInstImport", "OpString"})
"""Ops with a result and no type, besides those that make types."""

OPCODES: Mapping[str, int] = {
    "OpName": 5, "OpExtension": 10, "OpExtInstImport": 11, "OpExtInst": 12, "OpMemoryModel": 14, "OpEntryPoint": 15,
    "OpExecutionMode": 16, "OpCapability": 17, "OpTypeVoid": 19, "OpTypeBool": 20, "OpTypeInt": 21, "OpTypeFloat": 22, "OpTypeVector": 23,
    "OpTypeArray": 28, "OpTypeStruct": 30, "OpTypePointer": 32, "OpTypeFunction": 33, "OpConstantTrue": 41,
    "OpConstantFalse": 42, "OpConstant": 43, "OpConstantComposite": 44, "OpUndef": 1, "OpFunction": 54,
    "OpFunctionParameter": 55, "OpFunctionEnd": 56, "OpFunctionCall": 57, "OpVariable": 59, "OpLoad": 61, "OpStore": 62, "OpAccessChain": 65,
    "OpInBoundsAccessChain": 66, "OpInBoundsPtrAccessChain": 70, "OpDecorate": 71, "OpMemberDecorate": 72, "OpVectorExtractDynamic": 77,
    "OpVectorShuffle": 79, "OpCompositeConstruct": 80, "OpCompositeExtract": 81, "OpCompositeInsert": 82, "OpConvertFToU": 109,
    "OpConvertFToS": 110, "OpConvertSToF": 111, "OpConvertUToF": 112, "OpUConvert": 113, "OpSConvert": 114, "OpFConvert": 115,
    "OpConvertPtrToU": 117, "OpConvertUToPtr": 120, "OpBitcast": 124, "OpSNegate": 126, "OpFNegate": 127, "OpIAdd": 128, "OpFAdd": 129,
    "OpISub": 130, "OpFSub": 131, "OpIMul": 132, "OpFMul": 133, "OpUDiv": 134, "OpSDiv": 135, "OpFDiv": 136, "OpUMod": 137, "OpSRem": 138,
    "OpUMulExtended": 151, "OpSMulExtended": 152, "OpAny": 154, "OpAll": 155, "OpIsNan": 156, "OpLogicalEqual": 164, "OpLogicalNotEqual": 165,
    "OpLogicalOr": 166, "OpLogicalAnd": 167, "OpLogicalNot": 168, "OpSelect": 169, "OpIEqual": 170, "OpINotEqual": 171,
    "OpUGreaterThan": 172, "OpSGreaterThan": 173, "OpUGreaterThanEqual": 174, "OpSGreaterThanEqual": 175, "OpULessThan": 176,
    "OpSLessThan": 177, "OpULessThanEqual": 178, "OpSLessThanEqual": 179, "OpFOrdEqual": 180, "OpFUnordNotEqual": 183, "OpFOrdLessThan": 184,
    "OpFOrdGreaterThan": 186, "OpFOrdLessThanEqual": 188, "OpFOrdGreaterThanEqual": 190, "OpShiftRightLogical": 194,
    "OpShiftRightArithmetic": 195, "OpShiftLeftLogical": 196, "OpBitwiseOr": 197, "OpBitwiseXor": 198, "OpBitwiseAnd": 199, "OpNot": 200,
    "OpBitReverse": 204, "OpBitCount": 205, "OpControlBarrier": 224, "OpMemoryBarrier": 225, "OpAtomicLoad": 227, "OpAtomicStore": 228,
    "OpAtomicExchange": 229, "OpAtomicCompareExchange": 230, "OpAtomicIAdd": 234, "OpAtomicISub": 235, "OpAtomicSMin": 236,
    "OpAtomicUMin": 237, "OpAtomicSMax": 238, "OpAtomicUMax": 239, "OpAtomicAnd": 240, "OpAtomicOr": 241, "OpAtomicXor": 242, "OpPhi": 245,
    "OpLoopMerge": 246, "OpSelectionMerge": 247, "OpLabel": 248, "OpBranch": 249, "OpBranchConditional": 250, "OpReturn": 253, "OpUnreachable": 255,
    "OpGroupNonUniformElect": 333, "OpGroupNonUniformAll": 334, "OpGroupNonUniformAny": 335, "OpGroupNonUniformBallot": 339,
    "OpGroupNonUniformShuffle": 345, "OpGroupNonUniformShuffleXor": 346,
}  # fmt: skip
NAMES: Mapping[str, int] = {
    # capabilities
    "Matrix": 0, "Shader": 1, "Addresses": 4, "Linkage": 5, "Kernel": 6, "Vector16": 7, "Float16": 9, "Float64": 10, "Int64": 11, "Int64Atomics": 12,
    "Int16": 22, "Int8": 39, "GroupNonUniform": 61, "GroupNonUniformVote": 62, "GroupNonUniformBallot": 64, "GroupNonUniformShuffle": 65,
    "StorageBuffer16BitAccess": 4433, "StorageBuffer8BitAccess": 4448, "SignedZeroInfNanPreserve": 4466, "RoundingModeRTE": 4467, "DenormPreserve": 4464,
    "PhysicalStorageBufferAddresses": 5347,
    # addressing, memory and execution models, modes
    "Physical64": 2, "PhysicalStorageBuffer64": 5348, "GLSL450": 1, "OpenCL": 2, "GLCompute": 5, "LocalSize": 17, "ContractionOff": 31,
    # storage classes
    "UniformConstant": 0, "Input": 1, "Workgroup": 4, "CrossWorkgroup": 5, "Private": 6, "Function": 7, "PushConstant": 9,
    "PhysicalStorageBuffer": 5349,
    # decorations and built-in variables
    "Block": 2, "ArrayStride": 6, "BuiltIn": 11, "Constant": 22, "Offset": 35, "FuncParamAttr": 38, "LinkageAttributes": 41, "NoContraction": 42, "Alignment": 44,
    "NoAlias": 4, "NoWrite": 6, "Import": 1, "AliasedPointer": 5356,
    "WorkgroupId": 26, "LocalInvocationId": 27, "LocalInvocationIndex": 29, "SubgroupLocalInvocationId": 41,
    # flags
    "None": 0, "Unroll": 1, "DontUnroll": 2, "Aligned": 2, "Volatile": 1, "Const": 8,
    # OpenCL.std
    "ceil": 12, "exp2": 20, "fabs": 23, "floor": 25, "fma": 26, "log2": 38, "rint": 53, "sqrt": 61, "trunc": 66, "native_cos": 81, "native_divide": 82,
    "native_exp2": 84, "native_log2": 87, "native_recip": 90, "native_rsqrt": 91, "native_sin": 92, "native_sqrt": 93, "clz": 151, "ctz": 152, "s_mul_hi": 160,
    "popcount": 166, "u_mul_hi": 203,
    # GLSL.std.450
    "RoundEven": 2, "Trunc": 3, "FAbs": 4, "Floor": 8, "Ceil": 9, "Sin": 13, "Cos": 14, "Exp2": 29, "Log2": 30, "Sqrt": 31, "InverseSqrt": 32, "Fma": 50,
    "FindILsb": 73, "FindUMsb": 75,
}  # fmt: skip
_MODES = {"SignedZeroInfNanPreserve": 4461, "RoundingModeRTE": 4462, "DenormPreserve": 4459}
"""Modes of kernels that have the name of a capability."""
_TOKEN = re.compile(r'"[^"]*"|\S+')
_FLOATS = {16: ("<e", "<H"), 32: ("<f", "<I"), 64: ("<d", "<Q")}
_PARTS = {16: (10, 5), 32: (23, 8), 64: (52, 11)}


def assemble(text: str) -> bytes:
    """The bytes of a module; its first line is `; SPIR-V` and the version."""
    first, _, rest = text.partition("\n")
    major, minor = (int(part) for part in first.split()[2].split("."))
    ids: dict[str, int] = {}
    widths: dict[str, tuple[bool, int]] = {}
    """Which types are of one number: whether it is a float, and its bits."""
    words: list[int] = []
    for line in rest.splitlines():
        tokens = _TOKEN.findall(line)
        if not tokens or tokens[0][0] == ";":
            continue
        result = ""
        if len(tokens) > 1 and tokens[1] == "=":
            result, _, *tokens = tokens
        name, *operands = tokens
        start = len(words)
        words.append(0)
        if result and not name.startswith("OpType") and name not in _UNTYPED:
            words.append(_id(ids, operands[0]))
        if result:
            words.append(_id(ids, result))
        if name == "OpConstant":
            words += _number(operands[1], *widths[operands[0]])
        else:
            typed = bool(result) and not name.startswith("OpType") and name not in _UNTYPED
            for token in operands[1:] if typed else operands:
                if token[0] == "%":
                    words.append(ids[token] if token in ids else _id(ids, token))
                elif token[0] == '"':
                    words += _text(token[1:-1])
                elif token[0].isdigit():
                    words.append(int(token))
                elif name == "OpExecutionMode" and token in _MODES:
                    words.append(_MODES[token])
                else:
                    for part in token.split("|"):
                        if part not in NAMES:
                            raise CompilerBug.at("TW040", f"no SPIR-V number for '{part}' in: {line.strip()}")
                    words.append(NAMES[token] if token in NAMES else sum(NAMES[part] for part in token.split("|")))
        if name in ("OpTypeInt", "OpTypeFloat"):
            widths[result] = name == "OpTypeFloat", int(operands[0])
        if name not in OPCODES:
            raise CompilerBug.at("TW040", f"no SPIR-V number for {name}")
        words[start] = (len(words) - start) << 16 | OPCODES[name]
    head = [MAGIC, major << 16 | minor << 8, 0, len(ids) + 1, 0]
    return struct.pack(f"<{len(head) + len(words)}I", *head, *words)


def _id(ids: dict[str, int], name: str) -> int:
    return ids.setdefault(name, len(ids) + 1)


def _text(text: str) -> list[int]:
    raw = text.encode() + b"\0"
    raw += b"\0" * (-len(raw) % 4)
    return list(struct.unpack(f"<{len(raw) // 4}I", raw))


def _number(token: str, is_float: bool, bits: int) -> list[int]:
    if is_float:
        raw = float_bits(token, bits)
    else:
        raw = int(token) & ((1 << max(bits, 32)) - 1) if int(token) < 0 else int(token)
    return [raw & 0xFFFFFFFF, raw >> 32] if bits == 64 else [raw & 0xFFFFFFFF]


def float_text(value: float, bits: int) -> str:
    """A float as `float_bits` and `spirv-as` read it: infinities and NaN by an exponent no number has."""
    largest = 1 << (_PARTS[bits][1] - 1)
    if math.isnan(value):
        return f"0x1.8p+{largest}"
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}0x1p+{largest}"
    return value.hex()


def float_bits(token: str, bits: int) -> int:
    """The bits of a float."""
    mantissa, exponent = _PARTS[bits]
    largest = 1 << (exponent - 1)
    if token.endswith(f"p+{largest}"):
        sign = 1 << (bits - 1) if token[0] == "-" else 0
        return sign | ((1 << exponent) - 1) << mantissa | ((1 << (mantissa - 1)) if ".8" in token else 0)
    pack, unpack = _FLOATS[bits]
    return int(struct.unpack(unpack, struct.pack(pack, float.fromhex(token)))[0])
