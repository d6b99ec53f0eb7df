// Runs kernels that `tilewright export --target wgsl` wrote, in a browser with WebGPU. Needs nothing else.
//
//   const gpu = await Gpu.open();
//   const scale = await gpu.load(new URL("./scale.json", import.meta.url));
//   const out = scale.run(gpu.array(new Float32Array(6), [2, 3]), gpu.array(new Float32Array(3), [3]));
//   const numbers = await out.read();
//
// Arrays stay on the device between calls. What is wrong with a call is an Error before anything runs.

const TYPES = {
  f32: Float32Array, i32: Int32Array, u32: Uint32Array, i16: Int16Array, u16: Uint16Array, i8: Int8Array, u8: Uint8Array, bool: Uint8Array,
  f16: Uint16Array, bf16: Uint16Array, f8e4m3: Uint8Array, f8e5m2: Uint8Array, i64: BigInt64Array, u64: BigUint64Array,
};
const STORAGE = 0x80 | 0x4 | 0x8, UNIFORM = 0x40 | 0x8, READBACK = 0x1 | 0x8;
const CALLS = {
  floordiv: (a, b) => (b ? Math.floor(a / b) : 0), ceildiv: (a, b) => (b ? Math.ceil(a / b) : 0), mod: (a, b) => (b ? a - Math.floor(a / b) * b : 0),
  min: Math.min, max: Math.max,
};
const RELATIONS = { eq: (a, b) => a === b, le: (a, b) => a <= b, lt: (a, b) => a < b };

/** A size: a list of terms, each a factor and its atoms; an atom is a name or [call, a, b]. */
function evaluate(size, values) {
  let total = 0;
  for (const [factor, atoms] of size) {
    let product = factor;
    for (const atom of atoms) product *= typeof atom === "string" ? lookup(values, atom) : CALLS[atom[0]](evaluate(atom[1], values), evaluate(atom[2], values));
    total += product;
  }
  return total;
}

function lookup(values, name) {
  if (!(name in values)) throw new Error(`the size ${name} is not known`);
  return values[name];
}

const rowMajor = (shape) => shape.map((_, k) => shape.slice(k + 1).reduce((a, b) => a * Math.max(b, 1), 1));

/** An array on the device: a buffer, where it begins (in elements), shape and strides. */
export class GpuArray {
  constructor(gpu, buffer, dtype, shape, offset = 0, strides = rowMajor(shape)) {
    Object.assign(this, { gpu, buffer, dtype, shape, offset, strides });
  }
  get size() { return this.shape.reduce((a, b) => a * b, 1); }
  /** The same elements, in row-major order, with another shape. */
  reshape(...shape) {
    if (shape.reduce((a, b) => a * b, 1) !== this.size || String(this.strides) !== String(rowMajor(this.shape))) throw new Error(`cannot reshape [${this.shape}] to [${shape}]`);
    return new GpuArray(this.gpu, this.buffer, this.dtype, shape, this.offset);
  }
  /** Axes in another order; nothing is copied. */
  transpose(...order) {
    return new GpuArray(this.gpu, this.buffer, this.dtype, order.map((k) => this.shape[k]), this.offset, order.map((k) => this.strides[k]));
  }
  /** The part of one axis from `start` to `end`; nothing is copied. */
  slice(axis, start, end) {
    const shape = [...this.shape];
    shape[axis] = end - start;
    return new GpuArray(this.gpu, this.buffer, this.dtype, shape, this.offset + start * this.strides[axis], this.strides);
  }
  /** A copy in row-major order; it goes through the host. */
  async contiguous() { return this.gpu.array(await this.read(), this.shape, this.dtype); }
  /** The elements, as a typed array in row-major order. */
  async read() {
    const Type = TYPES[this.dtype], whole = new Type(await this.gpu.bytes(this.buffer)), out = new Type(this.size);
    const place = this.shape.map(() => 0);
    for (let n = 0; n < out.length; n++) {
      out[n] = whole[this.offset + place.reduce((sum, p, k) => sum + p * this.strides[k], 0)];
      for (let k = place.length - 1; k >= 0 && ++place[k] === this.shape[k]; k--) place[k] = 0;
    }
    return out;
  }
}

/** A device. */
export class Gpu {
  constructor(device) { this.device = device; }
  static async open() {
    if (!navigator.gpu) throw new Error("this browser has no WebGPU");
    const adapter = await navigator.gpu.requestAdapter();
    if (!adapter) throw new Error("WebGPU finds no adapter");
    const names = ["maxStorageBufferBindingSize", "maxBufferSize", "maxStorageBuffersPerShaderStage", "maxComputeWorkgroupStorageSize", "maxComputeInvocationsPerWorkgroup"];
    const requiredLimits = Object.fromEntries(names.map((name) => [name, adapter.limits[name]]));
    return new Gpu(await adapter.requestDevice({ requiredLimits }));
  }
  /** A new array with undefined contents. */
  empty(dtype, shape) {
    const bytes = shape.reduce((a, b) => a * b, 1) * TYPES[dtype].BYTES_PER_ELEMENT;
    return new GpuArray(this, this.device.createBuffer({ size: Math.max(16, Math.ceil(bytes / 16) * 16), usage: STORAGE }), dtype, shape);
  }
  /** A typed array on the device; `dtype` is needed only where its type does not tell. */
  array(values, shape = [values.length], dtype = Object.keys(TYPES).find((name) => values instanceof TYPES[name])) {
    if (shape.reduce((a, b) => a * b, 1) !== values.length) throw new Error(`${values.length} values do not fill an array of shape [${shape}]`);
    const made = this.empty(dtype, shape), bytes = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
    const padded = new Uint8Array(Math.ceil(bytes.length / 4) * 4);
    padded.set(bytes);
    this.device.queue.writeBuffer(made.buffer, 0, padded);
    return made;
  }
  async bytes(buffer) {
    const staging = this.device.createBuffer({ size: buffer.size, usage: READBACK }), encoder = this.device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, 0, staging, 0, buffer.size);
    this.device.queue.submit([encoder.finish()]);
    await staging.mapAsync(1);
    const copy = staging.getMappedRange().slice(0);
    staging.destroy();
    return copy;
  }
  /** The kernel that a description names. */
  async load(url) {
    const description = await (await fetch(url)).json(), code = await (await fetch(new URL(description.code, url))).text();
    return this.kernel(description, code);
  }
  async kernel(description, code) {
    const most = this.device.limits.maxStorageBuffersPerShaderStage;
    for (const launch of description.launches) if (launch.arrays.length > most) throw new Error(`${launch.entry} has ${launch.arrays.length} arrays; this device gives a kernel ${most}`);
    const module = this.device.createShaderModule({ code });
    const problems = (await module.getCompilationInfo()).messages.filter((message) => message.type === "error");
    if (problems.length) throw new Error(`${description.name}.wgsl:${problems[0].lineNum}: ${problems[0].message}`);
    const pipelines = await Promise.all(description.launches.map((launch) => this.device.createComputePipelineAsync({ layout: "auto", compute: { module, entryPoint: launch.entry } })));
    return new Kernel(this, description, pipelines);
  }
}

/** A kernel on a device; `run` takes its arguments in order. */
export class Kernel {
  constructor(gpu, description, pipelines) { Object.assign(this, { gpu, description, pipelines }); }

  run(...given) {
    const { inputs, outputs, scratch, launches, bindings, computed, checks, name } = this.description;
    if (given.length !== inputs.length) throw new Error(`${name} takes ${inputs.length} arguments, got ${given.length}`);
    const arrays = {}, numbers = {}, values = {};
    inputs.forEach((input, k) => {
      if (!input.shape) { numbers[input.name] = given[k]; values["$int." + input.name] = Number(given[k]); return; }
      const array = given[k];
      if (!(array instanceof GpuArray) || array.dtype !== input.dtype) throw new Error(`${name}: '${input.name}' must be an array of ${input.dtype}`);
      if (array.shape.length !== input.shape.length) throw new Error(`${name}: '${input.name}' has ${array.shape.length} axes, not ${input.shape.length}`);
      arrays[input.name] = array;
    });
    for (const bound of bindings) if (arrays[bound.array]) values[bound.name] = arrays[bound.array][bound.stride ? "strides" : "shape"][bound.axis];
    for (const [computedName, size] of computed) values[computedName] = Math.max(0, evaluate(size, values));
    for (const input of inputs) {
      if (!input.shape) continue;
      input.shape.forEach((size, axis) => {
        const want = evaluate(size, values), has = arrays[input.name].shape[axis];
        if (want !== has) throw new Error(`${name}: axis ${axis} of '${input.name}' has ${has} elements, not ${want}`);
        const stride = evaluate(input.strides[axis], values);
        if (has > 1 && stride !== arrays[input.name].strides[axis]) throw new Error(`${name}: '${input.name}' has stride ${arrays[input.name].strides[axis]} along axis ${axis}, not ${stride}: copy it first`);
      });
    }
    for (const check of checks) if (!RELATIONS[check.relation](evaluate(check.left, values), evaluate(check.right, values))) throw new Error(`${name}: ${check.message}`);
    for (const [fact, divisor] of this.description.facts) if (values[fact] % divisor) throw new Error(`${name} was compiled for ${fact} that ${divisor} divides; it is ${values[fact]}`);
    for (const one of outputs) arrays[one.name] = this.gpu.empty(one.dtype, one.shape.map((size) => evaluate(size, values)));
    for (const one of scratch) arrays[one.name] = this.gpu.empty(one.dtype, [one.shape.reduce((total, size) => total * evaluate(size, values), 1)]);
    const encoder = this.gpu.device.createCommandEncoder(), pass = encoder.beginComputePass();
    launches.forEach((launch, k) => this.dispatch(pass, launch, this.pipelines[k], arrays, numbers, values));
    pass.end();
    this.gpu.device.queue.submit([encoder.finish()]);
    const results = outputs.map((one) => arrays[one.name]);
    return results.length === 1 ? results[0] : results;
  }

  dispatch(pass, launch, pipeline, arrays, numbers, values) {
    const grid = launch.grid.map((size) => evaluate(size, values)), device = this.gpu.device;
    if (grid.some((extent) => extent <= 0)) return;
    for (const size of [...launch.values, ...launch.narrow]) if (Math.abs(evaluate(size, values)) >= 2 ** 31) throw new Error(`${launch.entry} needs indices of 64 bits for these sizes`);
    const blocks = grid.reduce((a, b) => a * b, 1), most = device.limits.maxComputeWorkgroupsPerDimension;
    const folded = grid.length <= 1 ? [Math.min(blocks, most), Math.ceil(blocks / most), 1] : [...grid, 1, 1].slice(0, 3);
    if (Math.max(...folded) > most) throw new Error(`${launch.entry} needs a grid of [${grid}]; this device allows ${most} along an axis`);
    const words = [[blocks, "u32"], [0, "u32"], ...launch.arrays.map((array) => [arrays[array].offset, "i32"]), ...launch.values.map((size) => [evaluate(size, values), "i32"])];
    for (const [number, dtype] of launch.numbers) words.push([numbers[number], dtype]);
    const length = words.reduce((sum, [, dtype]) => sum + (dtype.endsWith("64") ? 8 : 4), 0), view = new DataView(new ArrayBuffer(Math.ceil(length / 16) * 16));
    let at = 0;
    for (const [value, dtype] of words) {
      if (dtype === "f32") view.setFloat32(at, value, true);
      else if (dtype.endsWith("64")) view.setBigInt64(at, BigInt(value), true);
      else view.setInt32(at, Number(value) | 0, true);
      at += dtype.endsWith("64") ? 8 : 4;
    }
    const uniform = device.createBuffer({ size: view.byteLength, usage: UNIFORM });
    device.queue.writeBuffer(uniform, 0, view.buffer);
    const entries = [{ binding: 0, resource: { buffer: uniform } }, ...launch.arrays.map((array, k) => ({ binding: k + 1, resource: { buffer: arrays[array].buffer } }))];
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries }));
    pass.dispatchWorkgroups(...folded);
  }
}
