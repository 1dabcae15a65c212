// The elements of a page that can be acted upon, as they are on the screen: [x, y, tag, text] of each, with the middle in pixels.
(() => {
  const ACTIVE = 'a[href], button, input, select, textarea, label, summary, [role=button], [role=link], [role=tab], [contenteditable=true]'
  const SCROLLS = ['auto', 'scroll']
  const acts = one => one.matches(ACTIVE) || one.onclick || (SCROLLS.includes(getComputedStyle(one).overflowY) && one.scrollHeight > one.clientHeight)
  const results = []
  for (const one of document.body.querySelectorAll('*')) {
    if (results.length === 100) break
    if (!acts(one)) continue
    const box = one.getBoundingClientRect()
    const left = Math.max(box.left, 0), right = Math.min(box.right, innerWidth)
    const top = Math.max(box.top, 0), bottom = Math.min(box.bottom, innerHeight)
    if (right - left < 1 || bottom - top < 1) continue
    const x = (left + right) / 2, y = (top + bottom) / 2
    const hit = document.elementFromPoint(x, y)
    // What lies below a menu cannot be touched.
    if (!hit || !(one.contains(hit) || hit.contains(one))) continue
    const text = one.getAttribute('aria-label') ?? one.placeholder ?? one.innerText ?? ''
    const value = one.type === 'checkbox' ? (one.checked ? 'on' : 'off') : one.value ?? ''
    results.push([x, y, one.tagName.toLowerCase(), [text.trim().replace(/\s+/g, ' ').slice(0, 60), value].filter(Boolean).join(': ')])
  }
  return results
})()
