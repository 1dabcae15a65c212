// A page's clock and its random numbers, as at the recording: (moment in ms).
// The clock begins at the moment. It may advance within the first second after a page's start or a
// person's input, and then rests, so that it shows one second however long a policy thinks.
(moment => {
    let inputs = 0
    let since = performance.now()
    const count = event => {
        if (event.isTrusted) {
            inputs += 1
            since = performance.now()
        }
    }
    for (const kind of ["pointerdown", "keydown", "wheel"])
        addEventListener(kind, count, {capture: true, passive: true})
    const now = () => moment + 1000 * inputs + Math.min(999, Math.floor(performance.now() - since))
    const RealDate = Date
    const FrozenDate = new Proxy(RealDate, {
        construct: (target, values, made) =>
            Reflect.construct(target, values.length ? values : [now()], made),
        apply: () => new RealDate(now()).toString(),
        get: (target, name) => (name === "now" ? now : Reflect.get(target, name)),
    })
    RealDate.prototype.constructor = FrozenDate
    globalThis.Date = FrozenDate
    // mulberry32, a generator of 32 bits, from the same seed on every page.
    let state = 1
    const draw = () => {
        state = (state + 0x6d2b79f5) | 0
        let mixed = Math.imul(state ^ (state >>> 15), 1 | state)
        mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed
        return (mixed ^ (mixed >>> 14)) >>> 0
    }
    Math.random = () => draw() / 2 ** 32
    crypto.getRandomValues = array => {
        const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength)
        for (let place = 0; place < bytes.length; place++) bytes[place] = draw()
        return array
    }
    crypto.randomUUID = () => {
        const bytes = crypto.getRandomValues(new Uint8Array(16))
        bytes[6] = (bytes[6] & 0x0f) | 0x40
        bytes[8] = (bytes[8] & 0x3f) | 0x80
        const digits = Array.from(bytes, byte => byte.toString(16).padStart(2, "0")).join("")
        return digits.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-")
    }
})
