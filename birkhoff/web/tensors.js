// Captured rows in the page: tensors of a response as numbers, and as a safetensors file.

const SAFETENSORS = { float32: "F32", float16: "F16", bfloat16: "BF16", int64: "I64", int32: "I32" };
const MOST_ROWS = 256,
  MOST_COLUMNS = 512;

function bytesOf(tensor) {
  return Uint8Array.from(atob(tensor.data), (c) => c.charCodeAt(0));
}

/** Numbers of a tensor of a response: float32, float16, bfloat16 or integers, little-endian. */
function numbersOf(tensor) {
  const bytes = bytesOf(tensor),
    view = new DataView(bytes.buffer);
  const half = (bits) => {
    const sign = bits & 0x8000 ? -1 : 1,
      exponent = (bits >> 10) & 31,
      fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -24 * fraction;
  };
  const brain = (at) => {
    const wide = new DataView(new ArrayBuffer(4));
    wide.setUint32(0, view.getUint16(at, true) << 16);
    return wide.getFloat32(0);
  };
  const [size, read] = {
    float32: [4, (at) => view.getFloat32(at, true)],
    float16: [2, (at) => half(view.getUint16(at, true))],
    bfloat16: [2, brain],
    int64: [8, (at) => Number(view.getBigInt64(at, true))],
    int32: [4, (at) => view.getInt32(at, true)],
  }[tensor.dtype];
  return Float64Array.from({ length: bytes.length / size }, (_, i) => read(i * size));
}

/** A capture that lives in the page, with the fields of a stored one. */
export function memoryCapture(id, tensors) {
  const bytes = tensors.reduce((total, t) => total + Math.floor((t.data.length * 3) / 4), 0),
    rows = tensors.reduce((total, t) => total + t.shape[0], 0);
  return { id, status: "in this page", rows, bytes, tensors };
}

/** Rows of a tensor for a heat map; wide rows are subsampled to evenly spaced columns. */
export function sliceOf(tensor) {
  const numbers = numbersOf(tensor),
    width = numbers.length / Math.max(tensor.shape[0], 1),
    count = Math.min(width, MOST_COLUMNS),
    columns = Array.from({ length: count }, (_, i) => Math.floor((i * (width - 1)) / Math.max(count - 1, 1))),
    rows = tensor.positions.slice(0, MOST_ROWS);
  return { rows, columns, values: rows.map((_, y) => columns.map((x) => numbers[y * width + x])) };
}

/** The parts of a safetensors file with a tensor `hook.layer` for each of these. */
export function safetensors(tensors) {
  const header = {},
    parts = [];
  let offset = 0;
  for (const tensor of tensors) {
    const bytes = bytesOf(tensor);
    header[`${tensor.hook}.${tensor.layer}`] = {
      dtype: SAFETENSORS[tensor.dtype],
      shape: tensor.shape,
      data_offsets: [offset, offset + bytes.length],
    };
    offset += bytes.length;
    parts.push(bytes);
  }
  const text = new TextEncoder().encode(JSON.stringify(header)),
    padded = new Uint8Array(Math.ceil(text.length / 8) * 8).fill(32);
  padded.set(text);
  const length = new DataView(new ArrayBuffer(8));
  length.setBigUint64(0, BigInt(padded.length), true);
  return [new Uint8Array(length.buffer), padded, ...parts];
}
