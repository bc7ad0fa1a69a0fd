# Finds libtorch inside a Python wheel without its own CMake package, which would demand a CUDA
# toolkit for a CUDA wheel. CADRE_TORCH names it (a torch folder, the folder of a virtual environment,
# or a Python whose torch is used); else it is that of CMAKE_PREFIX_PATH (a torch folder, or its
# torch.utils.cmake_prefix_path), of .venv of the source tree, of the torch that an installed Cadre was
# built with, or of python3. cadre/launch/cli/torch_finder.h has the same rule but for CMAKE_PREFIX_PATH.
# Makes the target LibTorch::LibTorch and sets LibTorch_VERSION, LibTorch_DIR (the torch folder) and
# LibTorch_PYTHON (the Python that has it; empty when there is none).
set(CADRE_TORCH "$ENV{CADRE_TORCH}" CACHE STRING
    "A torch folder, the folder of a virtual environment, or the Python whose torch to use")
if(NOT CADRE_TORCH) # an earlier run has kept that there was none
  set(CADRE_TORCH "$ENV{CADRE_TORCH}")
endif()

if(CADRE_TORCH)
  set(candidates "${CADRE_TORCH}")
else()
  set(candidates)
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
    foreach(folder "${prefix}" "${prefix}/../..")
      if(EXISTS "${folder}/version.py" AND EXISTS "${folder}/lib/libtorch_cpu.so")
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

foreach(candidate IN LISTS candidates)
  if(IS_DIRECTORY "${candidate}" AND NOT EXISTS "${candidate}/version.py")
    set(candidate "${candidate}/bin/python3")  # a virtual environment
  endif()
  if(IS_DIRECTORY "${candidate}")
    set(LibTorch_DIR "${candidate}")
    # lib/pythonX.Y/site-packages/torch of a virtual environment.
    file(GLOB LibTorch_PYTHON "${candidate}/../../../../bin/python3")
    break()
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

if(LibTorch_DIR AND EXISTS "${LibTorch_DIR}/version.py")
  file(STRINGS "${LibTorch_DIR}/version.py" version_line REGEX "^__version__")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" LibTorch_VERSION "${version_line}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  LibTorch REQUIRED_VARS LibTorch_DIR VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE
    "set CADRE_TORCH to a torch folder, or to a Python or virtual environment that has torch (it is \"${CADRE_TORCH}\" now)")

if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  add_library(LibTorch::LibTorch INTERFACE IMPORTED)
  target_include_directories(
    LibTorch::LibTorch SYSTEM INTERFACE "${LibTorch_DIR}/include"
                                        "${LibTorch_DIR}/include/torch/csrc/api/include")
  # By their paths, so that CMake adds the folder to the RPATH of what is built and takes it out of
  # what is installed.
  target_link_libraries(LibTorch::LibTorch INTERFACE "${LibTorch_DIR}/lib/libtorch_cpu.so"
                                                     "${LibTorch_DIR}/lib/libc10.so")
endif()
