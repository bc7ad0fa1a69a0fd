# Finds libtorch inside a Python wheel, or unpacked from its ZIP, without its own CMake package,
# which would demand a CUDA toolkit for a CUDA build. It searches in this order: CADRE_TORCH (a
# torch folder, the folder of a virtual environment, or a Python whose torch is used);
# CMAKE_PREFIX_PATH (a torch folder, or its torch.utils.cmake_prefix_path); .venv of the source
# tree; the torch that an installed Cadre was built with; python3. A torch folder has its version in
# version.py, as in a wheel, or in build-version, as in the ZIP. cadre/launch/cli/torch_finder.h has
# the same order without CMAKE_PREFIX_PATH. Makes the target LibTorch::LibTorch and sets
# LibTorch_VERSION, LibTorch_DIR (the torch folder), LibTorch_PYTHON (the Python that has it; empty
# when there is none) and LibTorch_PROBLEM (why there is no usable libtorch; empty when there is
# one).
set(CADRE_TORCH "$ENV{CADRE_TORCH}" CACHE STRING
    "A torch folder, the folder of a virtual environment, or the Python whose torch to use")
if(NOT CADRE_TORCH) # an earlier run of CMake stored that none was found
  set(CADRE_TORCH "$ENV{CADRE_TORCH}")
endif()

if(CADRE_TORCH)
  set(candidates "${CADRE_TORCH}")
else()
  set(candidates)
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
    foreach(folder "${prefix}" "${prefix}/../..")
      if(EXISTS "${folder}/lib/libtorch_cpu.so"
         AND (EXISTS "${folder}/version.py" OR EXISTS "${folder}/build-version"))
        get_filename_component(folder "${folder}" ABSOLUTE)
        list(APPEND candidates "${folder}")
      endif()
    endforeach()
  endforeach()
  list(APPEND candidates "${CMAKE_SOURCE_DIR}/.venv/bin/python")
  if(IS_DIRECTORY "${cadre_installed_torch}")
    list(APPEND candidates "${cadre_installed_torch}")
  endif()
  list(APPEND candidates python3)
endif()

set(LibTorch_DIR "")
set(LibTorch_PYTHON "")
foreach(candidate IN LISTS candidates)
  if(EXISTS "${candidate}/version.py")
    set(LibTorch_DIR "${candidate}")
    # The torch folder of a virtual environment is lib/pythonX.Y/site-packages/torch in it, so its
    # Python is four folders up.
    file(GLOB LibTorch_PYTHON "${candidate}/../../../../bin/python3")
    break()
  endif()
  if(EXISTS "${candidate}/build-version")
    set(LibTorch_DIR "${candidate}")
    break()
  endif()
  if(IS_DIRECTORY "${candidate}")
    if(EXISTS "${candidate}/lib/libtorch_cpu.so" AND NOT EXISTS "${candidate}/bin/python3")
      set(LibTorch_DIR "${candidate}")  # without a version, which is reported below
      break()
    endif()
    set(candidate "${candidate}/bin/python3")  # a virtual environment
  endif()
  # find_spec does not import torch, so this takes milliseconds.
  execute_process(
    COMMAND "${candidate}" -c
            "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(found)
    set(LibTorch_DIR "${found}")
    set(LibTorch_PYTHON "${candidate}")
    break()
  endif()
endforeach()

set(version_line "")
if(LibTorch_DIR AND EXISTS "${LibTorch_DIR}/version.py")
  file(STRINGS "${LibTorch_DIR}/version.py" version_line REGEX "^__version__")
elseif(LibTorch_DIR AND EXISTS "${LibTorch_DIR}/build-version")
  file(STRINGS "${LibTorch_DIR}/build-version" version_line LIMIT_COUNT 1)
endif()
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" LibTorch_VERSION "${version_line}")

set(LibTorch_PROBLEM "")
if(NOT LibTorch_DIR)
  set(LibTorch_PROBLEM "none was found")
elseif(NOT LibTorch_VERSION)
  set(LibTorch_PROBLEM "${LibTorch_DIR} has no version such as 2.13.0 in version.py, as in a wheel, or in the first line of build-version, as in libtorch's ZIP")
endif()
set(remedy "set CADRE_TORCH to a torch folder (of a wheel, or unpacked from libtorch's ZIP), or to a Python or virtual environment that has torch (it is \"${CADRE_TORCH}\" now)")
if(LibTorch_PROBLEM)
  string(PREPEND remedy "${LibTorch_PROBLEM}: ")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch REQUIRED_VARS LibTorch_DIR LibTorch_VERSION VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "${remedy}")

if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  add_library(LibTorch::LibTorch INTERFACE IMPORTED)
  target_include_directories(
    LibTorch::LibTorch SYSTEM INTERFACE "${LibTorch_DIR}/include"
                                        "${LibTorch_DIR}/include/torch/csrc/api/include")
  # The libraries are linked by their paths, so that CMake adds their folder to the RPATH of what is
  # built, and removes it from what is installed.
  target_link_libraries(LibTorch::LibTorch INTERFACE "${LibTorch_DIR}/lib/libtorch_cpu.so"
                                                     "${LibTorch_DIR}/lib/libc10.so")
endif()
