// The state of the phone, which all its apps share, and the parts that they are made of.
// `phone.state` is what a task's check reads; `phone.only(...)` says that nothing else has changed.
(() => {
  const NAMES = ['Ada Brandt', 'Ben Castro', 'Carla Dunn', 'David Evans', 'Elena Fischer', 'Frank Gomez', 'Grace Hill', 'Hugo Ito', 'Irene Jung', 'Jonas Keller', 'Karin Lind', 'Leo Marsh', 'Mona Nagy', 'Nils Owen', 'Olga Petrov', 'Paul Quinn', 'Rosa Silva', 'Sven Tamm', 'Tara Usher', 'Uwe Vogel']
  const SWITCHES = ['Wi-Fi', 'Bluetooth', 'Airplane mode', 'Hotspot', 'Location', 'Dark theme', 'Battery saver', 'Do not disturb', 'Auto-rotate', 'NFC', 'Vibration', 'Screen lock', 'Backup', 'Developer mode']
  const query = new URLSearchParams(location.search)

  // Numbers in 0..1 from a seed (mulberry32), so that equal seeds give equal phones.
  function random(seed) {
    let state = seed >>> 0
    return () => {
      state = (state + 0x6D2B79F5) >>> 0
      let mixed = Math.imul(state ^ (state >>> 15), 1 | state)
      mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed
      return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296
    }
  }

  function first() {
    // FNV-1a makes a number of the seed, which may be any text.
    const letters = [...(query.get('seed') ?? '')]
    const next = random(letters.reduce((hash, letter) => Math.imul(hash ^ letter.codePointAt(0), 16777619), 2166136261))
    const digits = () => String(Math.floor(next() * 10000)).padStart(4, '0')
    const state = {
      seed: Math.floor(next() * 4294967296),
      settings: Object.fromEntries(SWITCHES.map(name => [name, false])),
      brightness: 40,
      contacts: NAMES.map(name => ({ name, number: `555 ${digits()}`, favourite: false })),
      alarms: [{ time: '06:30', on: true }, { time: '08:00', on: false }, { time: '21:45', on: true }],
      notes: [{ text: 'Shopping: milk, bread, apples', pinned: false }, { text: 'Ideas for the garden', pinned: false }],
      messages: [{ with: 'Grace Hill', mine: false, text: 'See you on Friday?' }, { with: 'Leo Marsh', mine: false, text: 'The meeting has moved to room 4.' }],
    }
    return Object.assign(state, JSON.parse(query.get('start') ?? '{}'))
  }

  const stored = localStorage.getItem('phone')
  const all = stored ? JSON.parse(stored) : (start => ({ start, state: structuredClone(start) }))(first())
  const state = all.state
  const save = () => localStorage.setItem('phone', JSON.stringify(all))
  save()

  const equal = (one, other) => JSON.stringify(one) === JSON.stringify(other)
  const only = (...parts) => Object.keys(all.start).every(key => parts.includes(key) || equal(all.start[key], state[key]))

  // All texts of people become text nodes: what is typed is never read as HTML.
  function element(tag, options = {}, ...children) {
    const { class: kind, ...properties } = options
    const made = Object.assign(document.createElement(tag), properties)
    if (kind) made.className = kind
    made.append(...children)
    return made
  }

  function menu(items) {
    const close = () => shown.remove()
    const shown = element('div', { class: 'menu' }, ...Object.entries({ ...items, Cancel: () => {} }).map(([label, act]) =>
      element('button', { onclick: () => { close(); act(); save(); app.show() } }, label)))
    document.body.append(shown)
  }

  // A row of a list: a tap opens it, a long press opens its menu.
  function row(children, tap, items) {
    const made = element('div', { class: 'row', onclick: tap ?? null }, ...children)
    made.addEventListener('contextmenu', event => { event.preventDefault(); menu(items) })
    return made
  }

  const app = { show() {} }
  // `views`: name -> function of the part behind it in the address, as in #edit/2; '' is the first.
  function views(title, all_views, add) {
    app.show = () => {
      const [view, ...rest] = decodeURIComponent(location.hash.slice(1)).split('/')
      const header = element('header', {}, element('span', {}, title))
      if (view === '' && add) header.append(element('button', { ariaLabel: 'Add', onclick: () => { location.hash = 'new' } }, '+'))
      document.body.replaceChildren(header, ...(all_views[view] ?? all_views[''])(rest.join('/')))
      document.documentElement.classList.toggle('dark', state.settings['Dark theme'])
    }
    addEventListener('hashchange', app.show)
    app.show()
  }

  // A form that saves with its button, or with the Enter key in a field of one line.
  function form(fields, submit) {
    const inputs = fields.map(({ label, area, ...more }) => element(area ? 'textarea' : 'input', { placeholder: label, ariaLabel: label, ...more }))
    return element('form', {
      class: 'form',
      onsubmit: event => {
        event.preventDefault()
        if (submit(...inputs.map(input => input.value.trim())) === false) return
        save()
        history.back()
      },
    }, ...inputs, element('button', {}, 'Save'))
  }

  window.phone = { state, save, only, element, row, menu, views, form, random, show: () => app.show() }
})()
